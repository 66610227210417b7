"""The scheduler as a plain function."""

from engine.scheduler import Decision, decide


def decision(
    waiting: list[str],
    decoding: list[str],
    *,
    idle: set[str] | None = None,
    able: set[str] | None = None,
    steps: int = 0,
    limit: int = 4,
) -> Decision[str]:
    return decide(
        waiting,
        decoding,
        session_idle=lambda name: idle is None or name in idle,
        may_step=lambda name: able is None or name in able,
        steps_taken=steps,
        decode_batch_limit=limit,
    )


def test_waiting_requests_come_in_order_of_arrival() -> None:
    """Everybody whose session is idle is offered memory, oldest first."""
    assert decision(["a", "b", "c"], []).admit == ("a", "b", "c")


def test_a_busy_session_does_not_hold_up_others() -> None:
    """A request whose session still runs is passed over."""
    assert decision(["a", "b"], [], idle={"b"}).admit == ("b",)


def test_only_those_who_may_step_are_in_the_step() -> None:
    """A session without ring room, or whose last token is in flight, sits out."""
    assert decision([], ["a", "b", "c"], able={"a", "c"}).decode == ("a", "c")


def test_everybody_gets_turns_when_more_decode_than_fit() -> None:
    """Over a few turns with a limit of 2, five sessions all step, none more than one turn more than another."""
    names = ["a", "b", "c", "d", "e"]
    counts = dict.fromkeys(names, 0)
    for steps in range(50):
        chosen = decision([], names, steps=steps, limit=2).decode
        assert len(chosen) == len(set(chosen)) == 2
        for name in chosen:
            counts[name] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
