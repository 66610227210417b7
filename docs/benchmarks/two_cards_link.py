"""What a pair of cards takes for granted, one thing after another, each said before it is tried; then how fast the link is.

    PYTHONPATH=. python docs/benchmarks/two_cards_link.py OUT.json

Seconds, and no model: what fails here would fail inside a step, and say less. The first line that is not followed by another is where.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.pair_graphs import pair_recorder
from engine.peer_opening import check_peer
from kernels.flag import advance_epoch, await_flag, raise_flag
from kernels.replicate import copy_across, copy_rows
from memory.host import HostBuffer
from memory.registration import registration_for
from streams.crossing import Crossing
from streams.device import DeviceBackend
from streams.event import Event

OWN, ITS = torch.device("cuda", 0), torch.device("cuda", 1)
ROW_BYTES, REPEATS = 656, 50
found: dict[str, Any] = {}


def say(what: str) -> None:
    print(what, flush=True)


def synchronize() -> None:
    for device in (OWN, ITS):
        torch.cuda.synchronize(device)


def milliseconds(stream: torch.cuda.Stream, work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Of one call of `work` on a stream, behind one that is not counted."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        work()
        begin.record(stream)
        for _ in range(repeats):
            work()
        end.record(stream)
    synchronize()
    return float(begin.elapsed_time(end)) / repeats


def reach() -> None:
    say(f"torch {torch.__version__}, {[torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}")
    found["access"] = [torch.cuda.can_device_access_peer(OWN, ITS), torch.cuda.can_device_access_peer(ITS, OWN)]
    say(f"access to one another's memory: {found['access']}; asked for now")
    check_peer(OWN, EngineConfig(device="cuda", peer=str(ITS)))


def places(own: torch.cuda.Stream, its: torch.cuda.Stream) -> None:
    say("a stream of the second card makes it the current device, and leaves the first one so")
    for entered in (its, torch.cuda.stream(its)):
        with entered:
            assert torch.cuda.current_device() == ITS.index, f"device {torch.cuda.current_device()} within"
            assert torch.cuda.current_stream() == its, f"{torch.cuda.current_stream()} within"
        assert torch.cuda.current_device() == OWN.index, f"device {torch.cuda.current_device()} behind"
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), f"{torch.cuda.current_stream()} behind"
    for here, there, stream in ((ITS, OWN, its), (OWN, ITS, own)):
        say(f"a launch of {here} reads {there}'s memory")
        source, target = torch.arange(5000, device=there), torch.zeros(5000, dtype=torch.int64, device=here)
        rows, copied = (torch.randint(256, (64, ROW_BYTES), dtype=torch.uint8).to(device) for device in (there, here))
        numbers = torch.arange(64) * ROW_BYTES
        addresses = [(numbers + each.data_ptr()).to(here) for each in (rows, copied)]
        synchronize()
        with stream:
            copy_across(target, source)
            copy_rows(addresses[0], addresses[1], ROW_BYTES)
        synchronize()
        assert torch.equal(target.cpu(), source.cpu()), "other values than there"
        assert torch.equal(copied.cpu(), rows.cpu()), "other rows than there"
    say("both read host memory that the first one registered")
    HostBuffer(1 << 26, registration_for(OWN, ITS)).close()


def flags(crossing: Crossing, own: torch.cuda.Stream, its: torch.cuda.Stream) -> None:
    """Behind `pair_recorder`, which has compiled and loaded the launches."""
    for waiting, raising, waits, raises in ((its, own, ".peer.", ""), (own, its, "", ".peer.")):
        say(f"a launch of {crossing.devices[waits]} waits until {crossing.devices[raises]} raises a flag in host memory")
        flag = crossing.next_flag()
        for part, stream in ((waits, waiting), (raises, raising)):
            with torch.cuda.stream(stream):
                advance_epoch(crossing.epoch_of[part])
        synchronize()
        with torch.cuda.stream(waiting):
            await_flag(flag, crossing.epoch_of[waits], crossing.lost)
        time.sleep(0.05)
        assert not waiting.query(), "it did not wait"
        with torch.cuda.stream(raising):
            raise_flag(flag, crossing.epoch_of[raises])
        began = time.monotonic()
        synchronize()
        assert int(crossing.lost[0]) == 0, f"it gave up after {time.monotonic() - began:.1f} s: the flag {int(flag[0])} was not seen"
    for epoch in crossing.epoch_of.values():
        epoch.zero_()
    crossing._flags.zero_()
    synchronize()


def graphs(own: torch.cuda.Stream, its: torch.cuda.Stream) -> None:
    say("launches of flags are compiled on both, and each has a graph")
    recorder = pair_recorder(OWN, ITS)
    flags(recorder.crossing, own, its)
    mine, peers = torch.zeros(1, device=OWN), torch.zeros(1, device=ITS)

    def pass_on(target: Tensor, source: Tensor) -> None:
        copy_across(target, source)
        target.add_(1)

    for stream, target, source in ((own, mine, peers), (its, peers, mine)):
        with torch.cuda.stream(stream):
            pass_on(target, source)
        synchronize()
    mine.zero_()
    synchronize()

    def issue(stream_of: Callable[[str], Any]) -> None:
        here, there = stream_of("s.compute"), stream_of("s.peer.compute")
        event: Event[None] = here.submit(lambda: None, label="begin")
        for _ in range(REPEATS):
            event = there.submit(partial(pass_on, peers, mine), label="there", after=(event,))
            event = here.submit(partial(pass_on, mine, peers), label="here", after=(event,))

    say("two graphs are captured at once, and replayed together")
    replay = recorder.record(issue, "s.compute")
    with torch.cuda.stream(own):
        replay()
    synchronize()
    assert int(recorder.crossing.lost[0]) == 0, "the first replay was given up"
    found["flag_us"] = 1e3 * milliseconds(own, replay, 100) / (2 * REPEATS)
    assert float(mine) == 2 * REPEATS * 102, f"{float(mine)} instead of {2 * REPEATS * 102}"


def speeds(own: torch.cuda.Stream, its: torch.cuda.Stream) -> None:
    say("speeds")
    for size_bytes in (ROW_BYTES, 24 << 10, 1 << 20, 256 << 20):
        source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for device in (OWN, ITS))
        synchronize()
        took = {
            "read by the peer": milliseconds(its, partial(copy_across, target, source)),
            "read by the owner": milliseconds(own, partial(copy_across, source, target)),
        }
        found[f"copy_{size_bytes}"] = {name: {"us": 1e3 * each, "GB_per_s": size_bytes / each / 1e6} for name, each in took.items()}
    rows, copied = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=OWN), torch.zeros(ROW_BYTES, dtype=torch.uint8, device=ITS)
    addresses = [torch.tensor([each.data_ptr()], device=ITS) for each in (rows, copied)]
    synchronize()

    def there_and_back() -> None:
        rows.fill_(1)
        its.wait_event(own.record_event())
        with torch.cuda.stream(its):
            copy_rows(addresses[0], addresses[1], ROW_BYTES)
        own.wait_event(its.record_event())

    found["replicated_row_us"] = 1e3 * milliseconds(own, there_and_back, 200)  # written here, copied there, and known here


def main(out: str) -> None:
    reach()
    backend = DeviceBackend(OWN, elsewhere={".peer.": ITS})
    own, its = (backend.open_stream(name, 8).stream for name in ("s.compute", "s.peer.compute"))
    assert (own.device, its.device) == (OWN, ITS), f"streams on {own.device} and {its.device}"
    places(own, its)
    graphs(own, its)
    speeds(own, its)
    Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    say(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
