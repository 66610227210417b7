"""The scheduler as plain functions: order, fairness between namespaces, priorities, and that nobody waits for ever."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.sampling import PRIORITY_MAX
from engine.scheduler import PATIENCE, Decision, Turns, decide, in_turn


@dataclass(eq=False)
class Asker:
    """A request as the scheduler sees it."""

    name: str
    namespace: str = ""
    priority: int = 0
    session: object = None
    since: int = 0
    waited: int = 0  # services of anybody since it came or was served, for tests

    def __post_init__(self) -> None:
        self.session = self.session or self.name


@dataclass
class Line:
    """Requests that take turns, in order of arrival."""

    turns: Turns = field(default_factory=Turns)
    askers: list[Asker] = field(default_factory=list)

    def add(self, *askers: Asker) -> None:
        for asker in askers:
            self.askers.append(asker)
            self.turns.join(asker)

    def names(self) -> str:
        return "".join(asker.name for asker in in_turn(self.askers, self.turns))

    def serve(self) -> Asker:
        """Serve the next one; it stays."""
        first = in_turn(self.askers, self.turns)[0]
        self.turns.serve([first])
        return first

    def remove(self, asker: Asker) -> None:
        self.askers.remove(asker)
        self.turns.leave(asker)


def line(*askers: Asker) -> Line:
    made = Line()
    made.add(*askers)
    return made


def decision(
    waiting: list[Asker], decoding: Line, *, idle: str | None = None, able: str | None = None, limit: int = 4
) -> Decision[Asker]:  # fmt: skip
    return decide(
        waiting,
        decoding.askers,
        session_idle=lambda asker: idle is None or asker.name in idle,
        may_step=lambda asker: able is None or asker.name in able,
        decode_batch_limit=limit,
        steps=decoding.turns,
    )


def names(askers: tuple[Asker, ...]) -> str:
    return "".join(asker.name for asker in askers)


def test_waiting_requests_are_offered_memory_in_the_order_given() -> None:
    """Everybody whose session is idle is offered memory."""
    assert names(decision([Asker("a"), Asker("b"), Asker("c")], line()).admit) == "abc"


def test_a_busy_session_does_not_hold_up_others() -> None:
    """A request whose session still runs is passed over."""
    assert names(decision([Asker("a"), Asker("b")], line(), idle="b").admit) == "b"


def test_only_those_who_may_step_are_in_the_step() -> None:
    """A session without ring room, or whose last token is in flight, sits out; nobody else is kept out."""
    found = decision([], line(Asker("a"), Asker("b"), Asker("c")), able="ac", limit=2)
    assert (names(found.decode), found.chosen) == ("ac", ())


def test_nobody_appends_while_a_chunk_is_open() -> None:
    """Without anybody to choose from, nobody is chosen."""
    assert decision([], line(Asker("a"))).append is None


def test_the_next_chunk_is_of_whoever_had_one_longest_ago() -> None:
    """A prompt that comes later has its chunk before the second one of a long prompt."""
    chunks = line(Asker("l"))
    assert chunks.serve().name == "l"
    chunks.add(Asker("s"))
    nobody = line()
    found = decide(
        [], [], session_idle=bool, may_step=bool, decode_batch_limit=1, steps=nobody.turns, appending=chunks.askers, chunks=chunks.turns
    )  # fmt: skip
    assert found.append is chunks.askers[1]


def _steps(decoding: Line, count: int, limit: int) -> Counter[str]:
    """How often each was in a step."""
    found: Counter[str] = Counter()
    for _ in range(count):
        chosen = decision([], decoding, limit=limit)
        assert len(set(names(chosen.decode))) == len(chosen.decode) == limit, "somebody twice, or a place left free"
        assert set(chosen.chosen) == set(chosen.decode)
        decoding.turns.serve(chosen.chosen)
        found.update(names(chosen.decode))
    return found


def test_everybody_gets_turns_when_more_decode_than_fit() -> None:
    """Over 50 steps with a limit of 2, five sessions all step 20 times."""
    assert set(_steps(line(*map(Asker, "abcde")), 50, limit=2).values()) == {20}


def test_members_of_a_step_keep_their_order() -> None:
    """Whoever was chosen, a step names its members in order of arrival, so that the same members are the same table."""
    decoding = line(*map(Asker, "abc"))
    for _ in range(6):
        chosen = decision([], decoding, limit=2)
        assert names(chosen.decode) == "".join(sorted(names(chosen.decode)))
        decoding.turns.serve(chosen.chosen)


def test_a_namespace_with_many_sessions_steps_as_often_as_one_with_one() -> None:
    """Three sessions of one key and one of another share a step of one place by keys."""
    decoding = line(Asker("a", "many"), Asker("b", "many"), Asker("c", "many"), Asker("z", "one"))
    found = _steps(decoding, 60, limit=1)
    assert found == {"a": 10, "b": 10, "c": 10, "z": 30}


def test_several_are_chosen_key_by_key() -> None:
    """Whoever is offered memory together comes one of each key, then the next of each."""
    waiting = line(Asker("a", "one"), Asker("b", "one"), Asker("c", "one"), Asker("y", "other"), Asker("z", "other"))
    assert waiting.names() == "aybzc"


def test_a_priority_counts_within_its_namespace_only() -> None:
    """The soonest request of one key takes nothing from another key."""
    decoding = line(Asker("a", "one", -PRIORITY_MAX), Asker("b", "one"), Asker("z", "other", PRIORITY_MAX))
    found = _steps(decoding, 200, limit=1)
    assert found["z"] == 100
    assert found["a"] > PATIENCE * found["b"] > 0


def test_a_step_of_priority_is_worth_eight_services() -> None:
    """A request one step sooner passes those that came up to 8 services before it, and no earlier ones."""
    for services, order in ((PATIENCE - 1, "sl"), (PATIENCE, "ls"), (PATIENCE + 1, "ls")):
        waiting = line(Asker("x"))
        waiting.add(Asker("l"))
        for _ in range(services):
            waiting.turns.serve(waiting.askers[:1])
        waiting.remove(waiting.askers[0])
        waiting.add(Asker("s", priority=-1))
        assert waiting.names() == order, f"after {services} services"


def test_turns_of_a_session_keep_their_order() -> None:
    """A later request of a session does not pass an earlier one, whatever its priority; others pass both or neither."""
    waiting = line(Asker("a", session="s", priority=2), Asker("b", session="s", priority=-4), Asker("c"))
    assert waiting.names() == "cab"


def test_a_namespace_that_comes_is_the_last() -> None:
    """Coming again and again under new names passes nobody who waits."""
    waiting = line(Asker("a", "one"), Asker("b", "one"))
    assert waiting.serve().name == "a"
    waiting.add(Asker("n", "new"))
    assert waiting.names()[0] == "b"


def test_nothing_is_kept_of_namespaces_that_left() -> None:
    """A server that many keys use keeps accounts of those that wait only."""
    waiting = line(Asker("a", "one"), Asker("b", "two"))
    for asker in list(waiting.askers):
        waiting.remove(asker)
    assert not waiting.turns._accounts


def passed_over_max(present: dict[str, int], namespace: str) -> int:
    """The most services of others before one's own, if there are never more than `present` requests of each namespace at once."""
    own = present[namespace] - 1 + 2 * PRIORITY_MAX * PATIENCE + 2
    return own + (len(present) - 1) * (own + 1)


ARRIVALS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 2), st.integers(-PRIORITY_MAX, PRIORITY_MAX)),
        st.tuples(st.just("serve"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(ARRIVALS, st.integers(-PRIORITY_MAX, PRIORITY_MAX))
@example([("come", key, PRIORITY_MAX) for key in (0, 1, 2)], -PRIORITY_MAX)
def test_nobody_waits_for_ever(moves: list[tuple[str, int, int]], flood: int) -> None:
    """Under any arrivals, departures and services, and then under a flood of requests as urgent as they come, everybody who waits is served
    within the bound."""
    most = 4
    waiting = Line()
    bounds = dict.fromkeys(("k0", "k1", "k2"), most)

    def come(namespace: str, priority: int) -> None:
        if sum(asker.namespace == namespace for asker in waiting.askers) < most:
            waiting.add(Asker("r", namespace, priority, session=object()))

    def serve(*, stays: bool) -> None:
        served = waiting.serve()
        for asker in waiting.askers:
            asker.waited += 1
            assert asker.waited - 1 <= passed_over_max(bounds, asker.namespace), f"{asker} was passed over"
        served.waited = 0
        if not stays:
            waiting.remove(served)

    for move, one, other in moves:
        if move == "come":
            come(f"k{one}", other)
        elif move == "leave" and waiting.askers:
            waiting.remove(waiting.askers[one % len(waiting.askers)])
        elif move == "serve":
            for _ in range(min(one, len(waiting.askers))):
                serve(stays=bool(other))
    old = list(waiting.askers)
    for _ in range(passed_over_max(bounds, "k0") + 1):
        for namespace in bounds:
            come(namespace, flood)
        serve(stays=False)
    assert not set(map(id, old)) & set(map(id, waiting.askers)), "somebody still waits"
