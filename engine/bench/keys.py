"""What narrower index keys change: which rows are selected, and which tokens are answered.

A text is read once with float32 keys. For some of its rows the same queries are then scored against the same keys as each narrower format
stores them, and the selections compared: what the format alone changes, nothing that follows from it. Then windows of the text are answered
greedily with keys of each format from the start. An answer that parts once is another text from there on, so each format is also led along
the float32 answer: at every place of it, would the next token have been the same? Prints nothing; knows no speed.

1. A row is compared only where there are more keys than it may select: before, every format selects them all.
2. An overlap is the share of a row's selected positions that both formats select.
3. All formats read the same ids; greedy answers never stop early.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import memory
from engine import append
from engine.bench.arm import Watch
from engine.bench.parity import Agreement, agreement
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadSetting
from engine.sampling import Sampling
from kernels.gather import gather_rows
from kernels.index_score import index_scores
from kernels.layout import BLOCK_ROWS, PAGE_KEYS, KeyLayout
from kernels.quantize import append_keys, stored_keys, unpack_keys
from kernels.select import select

__all__ = ["FORMATS", "Keys", "KeysPlan", "Overlap", "as_json", "own_text", "run", "table"]

FORMATS = ("bf16", "e4m3")
_VERSION = 1
_EVERY = 16  # of the rows that are compared
_EXACT = "f32"


@dataclass(frozen=True, slots=True)
class KeysPlan:
    """What to read and answer. Counts of tokens. Raises BadSetting."""

    model: Path
    engine: EngineConfig  # its key format is set by each run
    text: str
    read_tokens: int = 16_384
    windows: int = 8
    window_tokens: int = 2_048
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("read_tokens", "windows", "window_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise BadSetting(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


@dataclass(slots=True)
class Overlap:
    """Of one format and one selection group: sums over the rows compared."""

    rows: int = 0
    sum: float = 0.0
    least: float = 1.0
    equal: int = 0  # rows whose selections are the same

    def add(self, share: float) -> None:
        """One more row's."""
        self.rows, self.sum, self.least, self.equal = self.rows + 1, self.sum + share, min(self.least, share), self.equal + (share == 1.0)

    @property
    def mean(self) -> float:
        """0 without rows."""
        return self.sum / self.rows if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class Keys:
    """What was found, by format: `overlaps` a selection group, `answers` an agreement with float32 keys a window, and `led`, a window too,
    the share of places at which the next token is the float32 answer's."""

    read_tokens: int
    width: int
    overlaps: dict[str, list[Overlap]]
    answers: dict[str, list[Agreement]]
    led: dict[str, list[float]]
    key_bytes: dict[str, int] = field(default_factory=dict)


def own_text() -> str:
    """This program's own `memory/` as it is installed: source that the demo model cannot have seen."""
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(Path(memory.__file__).parent.glob("*.py")))


class _Comparison:
    """Stands between appends and their scores and selections, and compares."""

    def __init__(self, width: int, groups: int) -> None:
        self.overlaps = {name: [Overlap() for _ in range(groups)] for name in FORMATS}
        self._layouts = {name: KeyLayout(name, width) for name in FORMATS}  # type: ignore[arg-type]  # two of them
        self._asked: tuple[Any, ...] = ()
        self._group_of: dict[int, int] = {}

    def scores(
        self, query: Tensor, head_weights: Tensor, pages: Tensor, keys: int | Tensor, layout: KeyLayout, out: Tensor, *, tile: bool = False
    ) -> None:  # fmt: skip
        """As `index_scores`."""
        group = self._group_of.setdefault(pages.data_ptr(), len(self._group_of))  # pages of a layer are one row of one table
        self._asked = query, head_weights, pages, int(keys), layout, group
        index_scores(query, head_weights, pages, keys, layout, out, tile=tile)

    def select(self, scores: Tensor, first: Tensor, last: Tensor, k: int, out: Tensor) -> None:
        """As `select`, and then the other formats' choices for some of the rows."""
        select(scores, first, last, k, out)
        rows = [row for row, end in enumerate(last.tolist()) if end > k and end % _EVERY == 0]
        if not rows:
            return
        query, head_weights, pages, keys, layout, group = self._asked
        held = torch.empty((pages.shape[0], layout.page_bytes), dtype=torch.uint8, device=out.device)
        gather_rows(pages.contiguous(), layout.page_bytes, held)
        values = unpack_keys(stored_keys(held, layout)[:keys], layout)
        for name, other in self._layouts.items():
            narrow = _paged(values, other)
            there = narrow.data_ptr() + torch.arange(narrow.shape[0], device=out.device) * other.page_bytes
            told, chosen = torch.empty_like(scores[: len(rows)]), torch.empty_like(out[: len(rows)])
            index_scores(query[rows], head_weights[rows], there, keys, other, told)
            select(told, first[rows], last[rows], k, chosen)
            for mine, theirs in zip(out[rows].tolist(), chosen.tolist(), strict=True):
                self.overlaps[name][group].add(len(set(mine) & set(theirs)) / k)


def _paged(values: Tensor, layout: KeyLayout) -> Tensor:
    """uint8 [pages, page_bytes]: keys as a format stores them."""
    store = torch.zeros((-(-values.shape[0] // PAGE_KEYS), layout.page_bytes), dtype=torch.uint8, device=values.device)
    key = torch.arange(values.shape[0], device=values.device)
    append_keys(values, store.data_ptr() + key // BLOCK_ROWS * layout.run_bytes + key % BLOCK_ROWS * layout.step_bytes, 0, layout)
    return store


@contextmanager
def _compared(comparison: _Comparison) -> Iterator[None]:
    """Have appends score and select through the comparison."""
    before = append.index_scores, append.select  # type: ignore[attr-defined]  # imported there, which is what is replaced
    append.index_scores, append.select = comparison.scores, comparison.select  # type: ignore[attr-defined]
    try:
        yield
    finally:
        append.index_scores, append.select = before  # type: ignore[attr-defined]


async def _answer(engine: Engine, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return tuple([token async for chunk in engine.generate(list(ids), sampling) for token in chunk.token_ids])


async def _led(engine: Engine, ids: Sequence[int], answer: Sequence[int]) -> float:
    """Share of an answer's tokens that are said behind the ids and the answer's tokens before."""
    session, prompt, equal = await engine.create_session(), list(ids), 0
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    for number, token in enumerate(answer):
        [said] = [one async for chunk in engine.generate(prompt, sampling, session=session) for one in chunk.token_ids]
        equal += said == token
        await engine.truncate_session(session, len(ids) + number)
        prompt = [token]
    await engine.close_session(session)
    return equal / len(answer)


async def run(plan: KeysPlan, watch: Watch) -> Keys:
    """Read and answer. Raises ForebayError."""
    answers: dict[str, list[tuple[int, ...]]] = {}
    led: dict[str, list[float]] = {}
    key_bytes: dict[str, int] = {}
    overlaps: dict[str, list[Overlap]] = {}
    width = read = 0
    for name in (_EXACT, *FORMATS):
        config = replace(plan.engine, index_key_format=name)  # type: ignore[arg-type]  # one of the formats
        async with Engine.open(plan.model, config) as engine:
            ids = await engine.tokenizer.encode_async(plan.text)
            if len(ids) < plan.window_tokens:
                raise BadSetting(f"the text has {len(ids)} tokens, fewer than --window-tokens {plan.window_tokens}")
            layout = engine.stage.layout
            width, key_bytes[name] = layout.key.width, layout.key.key_bytes
            if name == _EXACT:
                comparison = _Comparison(width, layout.key_layers)
                read = min(len(ids), plan.read_tokens)
                with _compared(comparison):
                    watch("reading with f32 keys", 0, 1)
                    await _answer(engine, ids[:read], 1)
                    watch("reading with f32 keys", 1, 1)
                overlaps = comparison.overlaps
            starts = random.Random(1).choices(range(len(ids) - plan.window_tokens + 1), k=plan.windows)
            answers[name], led[name] = [], []
            for number, start in enumerate(starts):
                window = ids[start : start + plan.window_tokens]
                answers[name].append(await _answer(engine, window, plan.new_tokens))
                if name != _EXACT:
                    led[name].append(await _led(engine, window, answers[_EXACT][number]))
                watch(f"answering with {name} keys", number + 1, plan.windows)
    agreed = {name: [agreement(*pair) for pair in zip(answers[_EXACT], answers[name], strict=True)] for name in FORMATS}
    compared = {name: [one for one in ones if one.rows] for name, ones in overlaps.items()}
    return Keys(read, width, compared, agreed, led, key_bytes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_COLUMNS: tuple[tuple[str, Callable[[list[Overlap], list[Agreement], list[float]], str]], ...] = (
    ("rows compared", lambda overlaps, *_: str(sum(one.rows for one in overlaps))),
    ("selection overlap, by group", lambda overlaps, *_: ", ".join(f"{one.mean:.2%}" for one in overlaps) or "no row selects"),
    ("least", lambda overlaps, *_: f"{min((one.least for one in overlaps), default=1.0):.1%}"),
    ("next tokens equal", lambda _, __, led: f"{_mean(led):.2%}"),
    ("tokens before answers part", lambda _, answers, __: f"{_mean([one.leading for one in answers]):.1f}"),
    ("whole answers equal", lambda _, answers, __: f"{sum(one.share == 1.0 for one in answers)} of {len(answers)}"),
)


def table(plan: KeysPlan, found: Keys) -> Table:
    """For people."""
    windows = f"{plan.windows} windows of {plan.window_tokens:,} answered with {plan.new_tokens}"
    title = f"index keys beside f32 ones: {found.read_tokens:,} tokens read, {windows}"
    shown = Table("keys", "bytes", *(name for name, _ in _COLUMNS), title=title, title_justify="left")
    for name in FORMATS:
        shown.add_row(
            name, str(found.key_bytes[name]), *(say(found.overlaps[name], found.answers[name], found.led[name]) for _, say in _COLUMNS)
        )
    return shown


def as_json(plan: KeysPlan, found: Keys, machine: dict[str, Any]) -> dict[str, Any]:
    """For programs."""
    return {
        "version": _VERSION, "kind": "keys", "machine": machine, "model": plan.model.name, "row_format": plan.engine.row_format,
        "text_sha256": hashlib.sha256(plan.text.encode()).hexdigest(), "read_tokens": found.read_tokens, "compared_every": _EVERY,
        "windows": plan.windows, "window_tokens": plan.window_tokens, "new_tokens": plan.new_tokens, "key_width": found.width,
        "formats": {
            name: {
                "key_bytes": found.key_bytes[name],
                "overlap": [{"rows": one.rows, "mean": one.mean, "least": one.least, "equal": one.equal} for one in found.overlaps[name]],
                "led": found.led[name],
                "answers": [{"leading": one.leading, "share": one.share} for one in found.answers[name]],
            }
            for name in FORMATS
        },
    }  # fmt: skip
