"""Decode steps on a tape: which operation ran when, on which stream.

Where steps are replays of a recording, the recording itself takes the device's times around every piece of its work, and the tape holds one
step, the last; what the times cost (a few microseconds an operation) is in it. Elsewhere, and on two devices, the streams are
observed over the last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.bench.arm import Load, Watch, forget_engines, seeded_prompt
from engine.config import EngineConfig
from engine.device import device_of, streams_of
from engine.engine import Engine
from engine.peer_opening import check_peer
from engine.sampling import Sampling
from streams import Event, Tape, TapeRecorder
from streams.capture import GraphRecorder, Mark
from streams.tape import Completed, Header, Record, Submitted

__all__ = ["tape_of_marks", "taped_steps"]

_OBSERVED_TOKENS = 6


@dataclass(slots=True)
class _Switched:
    """An observer that records what is submitted while it is on, and what becomes of that."""

    recorder: TapeRecorder
    on: bool = False
    _taken: set[int] = field(default_factory=set)

    def submitted(
        self, event: Event[Any], after: Sequence[Event[Any]], waits: Sequence[Event[Any]], payload_bytes: int, at_ns: int
    ) -> None:
        """See `Observer.submitted`."""
        if self.on:
            self._taken.add(event.number)
            self.recorder.submitted(event, after, waits, payload_bytes, at_ns)

    def started(self, event: Event[Any], at_ns: int) -> None:
        """See `Observer.started`."""
        if event.number in self._taken:
            self.recorder.started(event, at_ns)

    def completed(self, event: Event[Any], error: BaseException | None, at_ns: int) -> None:
        """See `Observer.completed`."""
        if event.number in self._taken:
            self.recorder.completed(event, error, at_ns)

    def awaited(self, event: Event[Any], ended: bool, at_ns: int) -> None:
        """See `Observer.awaited`."""
        if event.number in self._taken:
            self.recorder.awaited(event, ended, at_ns)


async def taped_steps(load: Load, config: EngineConfig, watch: Watch) -> Tape:
    """Generate `load.warmup_tokens` and a few more tokens, and put the last steps on a tape. Raises ForebayError."""
    try:
        return await _taped(load, config, watch)
    finally:
        await forget_engines(config)


async def _taped(load: Load, config: EngineConfig, watch: Watch) -> Tape:
    device = device_of(config)
    if config.peer:
        config = replace(config, graphs="off")  # times of two devices cannot be compared: what the host sees can
    records: list[Record] = []
    observer = _Switched(TapeRecorder(records.extend))
    backend = streams_of(device, observer, peer=check_peer(device, config))
    notes = {"model": load.model.name, "placement": config.placement, "device": device.type}
    try:
        async with Engine.open(load.model, config, backend=backend, progress=lambda done, total: watch("loading", done, total)) as engine:
            recorder = engine.stage.recorder
            if isinstance(recorder, GraphRecorder):
                recorder.marks = []
            await _generate(load, engine, observer, watch)
            if isinstance(recorder, GraphRecorder) and recorder.marks:
                return tape_of_marks(recorder.marks, notes)
    finally:
        await backend.close()
    observer.recorder.flush()
    return Tape(Header(notes=notes), tuple(records))


async def _generate(load: Load, engine: Engine, observer: _Switched, watch: Watch) -> None:
    prompt = seeded_prompt(engine.stage.model.config.vocabulary, load.prompt_tokens)
    tokens = load.warmup_tokens + _OBSERVED_TOKENS
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    count = 0
    async for chunk in engine.generate(prompt, sampling, history=load.history):
        count += len(chunk.token_ids)
        observer.on = observer.on or count >= load.warmup_tokens
        watch("decoding", count, tokens)


def tape_of_marks(marks: Sequence[Mark], notes: dict[str, str]) -> Tape:
    """One step from the times of a recording's last replay, which is over. All of it was submitted at once, when its first work began."""
    torch.cuda.synchronize()
    first = marks[0].begin

    def at_ns(event: torch.cuda.Event) -> int:
        return max(0, round(1e6 * float(first.elapsed_time(event))))

    submitted: list[Record] = [
        Submitted(number, 0, mark.stream, mark.label, after=mark.after) for number, mark in enumerate(marks)
    ]  # fmt: skip
    ended = [(at_ns(mark.begin), at_ns(mark.end), number) for number, mark in enumerate(marks)]
    completed = [Completed(number, end, min(begin, end)) for begin, end, number in sorted(ended, key=lambda each: each[1])]
    return Tape(Header(notes=notes), (*submitted, *completed))
