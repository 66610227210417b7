"""What Prometheus is told: requests as they end, and whatever can be read off the engine when it asks.

Holds a registry of its own. Knows no HTTP objects and no engine but its instruments. `docs/metrics.md` has every name; a test compares.

1. Between two scrapes a request costs a few counts at its end, and a token nothing.
2. Before an engine is open, and once it has closed, its names are absent, and not zero.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine.loop_lag import LoopLag
from engine.measures import InstrumentsFace, Measures, Waits
from engine.request_record import RequestRecord

__all__ = ["Metrics"]

_Labels: TypeAlias = Mapping[str, str]
_Sample: TypeAlias = tuple[_Labels, float]

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """One server's. Loop thread only."""

    def __init__(self) -> None:
        self.lag = LoopLag()
        self._instruments: InstrumentsFace | None = None
        self._about: dict[str, str] = {}
        self._state = "loading"
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "forebay_requests", "HTTP requests that have ended", ["route", "status", "reason"], registry=self._registry
        )  # fmt: skip
        self._first = Histogram(
            "forebay_time_to_first_token_seconds", "From a request's arrival to its first token", buckets=_SECONDS, registry=self._registry
        )
        self._whole = Histogram(
            "forebay_end_to_end_seconds", "From a generating request's arrival to the end of its answer", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_Read(self))

    def opened(self, instruments: InstrumentsFace, about: Mapping[str, str]) -> None:
        """There is an engine. Args: about: what it is, as labels of `forebay_info`."""
        self._instruments, self._about = instruments, dict(about)

    def finished(self, record: RequestRecord, route: str) -> None:
        """A request has ended. Args: route: the pattern it matched, never what a client sent."""
        self._requests.labels(route, str(record.status), record.finish_reason or "").inc()
        if record.first is not None:
            self._first.observe(record.first - record.started)
            self._whole.observe(record.ended - record.started)

    def exposition(self, accept: str, state: str) -> tuple[bytes, str]:
        """Everything now, as text, and its content type. Args: accept: what the scraper takes. state: of the server."""
        self._state = state
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def families(self) -> Iterator[Metric]:
        """What is read when somebody asks."""
        yield _gauge("ready", "1 while requests are served", [({}, float(self._state == "ready"))])
        yield _histogram("loop_lag_seconds", "How late the event loop called a timer", self.lag.waits())
        instruments = self._instruments
        if instruments is None or not instruments.open:
            return
        yield InfoMetricFamily("forebay", "What is served", value=self._about)
        yield from _families(instruments.measures())


class _Read(Collector):
    """Reads what `Metrics` can read, when a registry collects."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        return self._metrics.families()


def _families(found: Measures) -> Iterator[Metric]:
    """All that is read off an engine."""
    yield from _of_requests(found)
    yield from _of_rows(found)
    yield from _of_memory(found)
    yield from _of_streams(found)


def _of_requests(found: Measures) -> Iterator[Metric]:
    states = {"waiting": found.waiting, "appending": found.appending, "decoding": found.decoding}
    yield _gauge("open_requests", "Requests that have not ended, by state", _by("state", states))
    yield _gauge("sessions", "Sessions by kind", _by("kind", found.sessions))
    yield _counter("prompt_tokens", "Prompt tokens whose rows were found or made", [({}, found.tokens.prompt)])
    yield _counter("cached_tokens", "Prompt tokens whose rows were there already", [({}, found.tokens.cached)])
    yield _counter("generated_tokens", "Tokens generated", [({}, found.tokens.generated)])
    yield _counter("steps", "Decode steps submitted", [({}, found.steps)])
    places = [str(place) for place in range(1, len(found.drafts_proposed) + 1)]
    yield _counter("drafts_proposed", "Drafts judged", _by("place", dict(zip(places, found.drafts_proposed, strict=True))))
    yield _counter("drafts_accepted", "Drafts accepted", _by("place", dict(zip(places, found.drafts_accepted, strict=True))))
    yield _histogram("inter_token_seconds", "From one step of a generation to its next", found.waits)
    yield _counter("stalls", "Waits of a generation for its next step over 200 ms", [({}, found.stalls)])


def _of_rows(found: Measures) -> Iterator[Metric]:
    yield _counter("hot_hits", "Selected rows read from a hot cache", [({}, found.hits)])
    yield _counter("hot_misses", "Selected rows read from RAM", [({}, found.misses)])
    yield _counter("ring_reads", "Selected rows read from a ring", [({}, found.ring_reads)])
    rows = {"ram": found.mirrored_rows, "hot": found.hot_rows, "ring": found.ring_rows}
    yield _gauge("rows", "Rows of all sessions in positions, by where they are", _by("place", rows))
    yield _gauge("copyback_lag_rows", "Committed rows that are not in RAM yet, of all sessions", [({}, found.lag_rows)])
    yield _gauge("copyback_lag_rows_most", "The same of the session that has most", [({}, found.lag_rows_most)])


def _of_memory(found: Measures) -> Iterator[Metric]:
    held = [({"tier": tier, "owner": owner}, size) for tier, owners in found.held_bytes.items() for owner, size in owners.items()]
    yield _gauge("held_bytes", "Physical bytes by tier and owner", held)
    yield _gauge("arena_bytes", "Host memory for histories", [({}, found.arena.total_bytes)])
    yield _gauge("arena_used_bytes", "Bytes of its blocks that hold rows", [({}, found.arena.used_bytes)])
    yield _gauge("arena_reserved_bytes", "Bytes promised to sessions and not used yet", [({}, found.arena.reserved_bytes)])
    if found.device_budget_bytes is not None:
        yield _gauge("device_budget_bytes", "Device memory that sessions may take", [({}, found.device_budget_bytes)])


def _of_streams(found: Measures) -> Iterator[Metric]:
    streams = found.streams
    yield _counter("stream_operations", "Operations completed", [({"stream": one.name}, one.operations) for one in streams])
    yield _counter("stream_failures", "Operations failed", [({"stream": one.name}, one.failed) for one in streams])
    yield _counter("stream_payload_bytes", "Bytes moved", [({"stream": one.name}, one.payload_bytes) for one in streams])
    yield _counter("stream_busy_seconds", "Time spent in work", [({"stream": one.name}, one.busy_s) for one in streams])
    yield _gauge("stream_in_flight", "Operations submitted and not done", [({"stream": one.name}, one.in_flight) for one in streams])


def _by(label: str, counts: Mapping[str, float]) -> list[_Sample]:
    return [({label: name}, count) for name, count in counts.items()]


def _counter(name: str, meaning: str, samples: Iterable[_Sample]) -> Metric:
    return _filled(CounterMetricFamily(f"forebay_{name}", meaning), f"forebay_{name}_total", samples)


def _gauge(name: str, meaning: str, samples: Iterable[_Sample]) -> Metric:
    return _filled(GaugeMetricFamily(f"forebay_{name}", meaning), f"forebay_{name}", samples)


def _filled(family: Metric, sample: str, samples: Iterable[_Sample]) -> Metric:
    for labels, value in samples:
        family.add_sample(sample, dict(labels), float(value))
    return family


def _histogram(name: str, meaning: str, waits: Waits) -> Metric:
    """Counts up to each bound, added up as Prometheus wants them."""
    buckets, total = [], 0
    for bound, count in zip((*map(str, waits.bounds_s), "+Inf"), waits.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(f"forebay_{name}", meaning, buckets=buckets, sum_value=waits.sum_s)
