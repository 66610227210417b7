"""What a step waits while an append brings a long history from RAM: launches of a step's kind beside the fetch of a layer, by how many
programs of the fetch run at once.

    python docs/benchmarks/fetch_beside.py OUT [ROWS]

Three arms, each a device graph on a stream of high priority: products (weights read from the device's memory), small launches that wait for
each other, and reads of few rows from RAM. Beside them, on a stream of low priority, fetches of one layer's ROWS rows (491,520), which are
compared with the rows in RAM. Then which of some streams are held up by a fetch that stands behind another: streams share the driver's
queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 if it is not set). Medians; writes OUT/fetch_beside.json. Needs a device; a minute.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.gate.machine import machine
from kernels.gather import gather_blocks, gather_rows
from kernels.gather import kernel as gather

ROW_BYTES, BLOCK_ROWS = 656, 64
AT_ONCE = (1, 2, 3, 4, 6, 8, 16, 32)
REPEATS, CHAIN, STREAMS = 7, 48, 16


def products() -> Callable[[], None]:
    """CHAIN matrices of 6,144 x 6,144 in bf16, each read once."""
    weights = [torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16) for _ in range(CHAIN)]
    x = torch.randn(6144, 1, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)

    def work() -> None:
        for weight in weights:
            torch.mm(weight, x, out=y)

    return work


def small() -> Callable[[], None]:
    """Launches of one megabyte that wait for each other."""
    x = torch.zeros(1 << 18, device="cuda")

    def work() -> None:
        for _ in range(8 * CHAIN):
            x.add_(1.0)

    return work


def rows_of(source: torch.Tensor) -> Callable[[], None]:
    """Twenty rows from RAM, CHAIN times, one behind the other."""
    starts = torch.randint(0, source.shape[0] // ROW_BYTES, (CHAIN, 20)) * ROW_BYTES + source.data_ptr()
    addresses, out = starts.cuda(), torch.empty((20, ROW_BYTES), dtype=torch.uint8, device="cuda")

    def work() -> None:
        for each in addresses:
            gather_rows(each, ROW_BYTES, out)

    return work


def graph_of(work: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The same, recorded."""
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def took_ms(replay: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Between two events of the stream."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        begun.record()
        replay()
        ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def held_up(fetch: Callable[[], None], low: torch.cuda.Stream, fetch_ms: float) -> list[bool]:
    """Of STREAMS streams, in order of their making, whether a product behind two fetches of another stream begins after the first."""
    work, found = products(), []
    for stream in [torch.cuda.Stream(priority=-1) for _ in range(STREAMS)]:
        took_ms(work, stream)
        with torch.cuda.stream(low):
            fetch()
            fetch()
        began = time.perf_counter()  # an event of the stream's own would be held up with it
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        found.append(1e3 * (time.perf_counter() - began) > fetch_ms)
        torch.cuda.synchronize()
    return found


def main(out: Path, rows: int) -> None:
    """Measure and write."""
    high, low = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)
    block_bytes = BLOCK_ROWS * ROW_BYTES
    blocks = -(-rows // BLOCK_ROWS)
    source = torch.randint(0, 256, (blocks * block_bytes,), dtype=torch.uint8).pin_memory()
    addresses = (torch.arange(blocks) * block_bytes + source.data_ptr()).cuda()
    held = torch.empty((rows, ROW_BYTES), dtype=torch.uint8, device="cuda")
    arms = {"products": products(), "small": small(), "rows": rows_of(source)}
    graphs = {name: graph_of(work, high) for name, work in arms.items()}
    torch.cuda.synchronize()

    def fetch() -> None:
        gather_blocks(addresses, 0, rows, ROW_BYTES, held)

    alone = {name: statistics.median(took_ms(graph.replay, high) for _ in range(REPEATS)) for name, graph in graphs.items()}
    found: list[dict[str, Any]] = []
    for at_once in AT_ONCE:
        gather.BLOCKS_AT_ONCE = at_once
        held.zero_()
        took_ms(fetch, low)
        assert torch.equal(held.cpu().flatten()[: rows * ROW_BYTES], source[: rows * ROW_BYTES]), "the fetch brought other rows"
        fetch_ms = statistics.median(took_ms(fetch, low) for _ in range(REPEATS))
        beside = {}
        for name, graph in graphs.items():
            times = []
            for _ in range(REPEATS):
                with torch.cuda.stream(low):
                    for _ in range(2 + int(2 * alone[name] / fetch_ms)):
                        fetch()
                time.sleep(0.001)  # the fetch is under way
                times.append(took_ms(graph.replay, high))
                torch.cuda.synchronize()
            beside[name] = statistics.median(times)
        programs = at_once * -(-block_bytes // 4 // gather.WORDS_TILE)
        row = {"blocks_at_once": at_once, "programs": programs, "fetch_ms": fetch_ms, "fetch_gb_per_s": rows * ROW_BYTES / fetch_ms / 1e6}
        found.append({**row, "beside_ms": beside, "beside_of_alone": {name: beside[name] / alone[name] for name in beside}})
        print(json.dumps(found[-1]), flush=True)
    gather.BLOCKS_AT_ONCE = AT_ONCE[2]
    waits = held_up(fetch, low, found[2]["fetch_ms"])
    print(json.dumps({"held_up": waits}), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "kind": "fetch_beside",
        "rows": rows,
        "row_bytes": ROW_BYTES,
        "alone_ms": alone,
        "found": found,
        "held_up": waits,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "machine": machine(probe=True),
    }
    (out / "fetch_beside.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 491_520)
