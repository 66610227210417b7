"""The simulated pipeline: one session alone, full stages, batches, drafts, and that it repeats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.simulation.article import tokens_a_step
from engine.simulation.costs import Machine, StageShape
from engine.simulation.pipeline import Load, simulate

MACHINE = Machine(1000.0, 100.0, head_bytes=10**9, join_bytes=10**8)
STAGES = tuple(StageShape(number // 2, 10, 3, number == 3) for number in range(4))


def load(sessions: int = 1, depth: int = 0, limit: int = 1, history: int = 50_000, new_tokens: int = 100, acceptance: float = 0.8) -> Load:
    return Load(sessions, depth, limit, history, new_tokens, acceptance)


def test_one_session_alone_takes_a_step_after_another() -> None:
    """100 tokens without drafts take 100 steps, each from the first stage back to it, but for the way back of the last."""
    outcome = simulate(MACHINE, STAGES, load())
    first, last = (MACHINE.step_us(STAGES, 0, 50_000 + grown) for grown in (0, 99))
    assert 100 * first - MACHINE.link_us <= 1e6 * outcome.seconds <= 100 * last
    assert (outcome.tokens, outcome.batch) == (100, 1.0)
    assert outcome.step_ms == pytest.approx(1000 * outcome.seconds / 100)


def test_more_sessions_than_stages_fill_the_slowest_stage() -> None:
    """With one session a stage the slowest stage bounds the throughput, and twelve sessions on four stages come within 2% of it."""
    slowest_us = max(MACHINE.pass_us(stage, [1], [50_000]) for stage in STAGES)
    outcome = simulate(MACHINE, STAGES, load(sessions=12))
    assert 0.98e6 / slowest_us <= outcome.steady <= 1e6 / slowest_us
    assert max(outcome.busy) > 0.97


def test_few_sessions_do_not_wait_for_one_another() -> None:
    """Three sessions on four stages are three times as fast as one: a stage is never taken when one arrives, once they are apart."""
    alone, three = (simulate(MACHINE, STAGES, load(sessions=count)).steady for count in (1, 3))
    assert three == pytest.approx(3 * alone, rel=0.02)


def test_batches_pay_when_there_are_as_many_as_stages() -> None:
    """Four sessions that travel together leave three of four stages idle and are slower than apart; sixteen fill them and are faster."""
    histories = [50_050] * 4

    def steady(sessions: int, limit: int) -> float:
        return simulate(MACHINE, STAGES, load(sessions=sessions, limit=limit)).steady

    ways_us = MACHINE.step_us(STAGES, 0, 50_050) - sum(MACHINE.pass_us(stage, [1], [50_050]) for stage in STAGES)
    together_us = sum(MACHINE.pass_us(stage, [1] * 4, histories) for stage in STAGES) + ways_us
    assert steady(4, 4) == pytest.approx(4e6 / together_us, rel=0.02)
    assert steady(4, 1) == pytest.approx(1e6 / max(MACHINE.pass_us(stage, [1], [50_050]) for stage in STAGES), rel=0.03)
    assert steady(16, 4) == pytest.approx(4e6 / max(MACHINE.pass_us(stage, [1] * 4, histories) for stage in STAGES), rel=0.05)
    assert steady(4, 1) > steady(4, 4)
    assert steady(16, 4) > 2 * steady(16, 1)


def test_drafts_give_the_tokens_that_their_acceptance_says() -> None:
    """Over many steps a step of three drafts gives 1 + p + p^2 + p^3 tokens, never more than four, and the last step is cut to the end."""
    outcome = simulate(MACHINE, STAGES, load(sessions=8, depth=3, new_tokens=2000))
    per_step = outcome.steady / 8 * outcome.step_ms / 1000
    assert outcome.tokens == 8 * 2000
    assert per_step == pytest.approx(tokens_a_step(0.8, 3), rel=0.02)
    assert simulate(MACHINE, STAGES, load(depth=3, acceptance=1.0)).tokens == 100


def test_a_longer_history_costs_its_keys_in_full_layers_alone() -> None:
    """Twelve full layers and nothing else read keys: a step grows by twelve times the keys' time, with drafts once more for the block."""
    plain, drafting = (MACHINE.step_us(STAGES, depth, 1 << 20) - MACHINE.step_us(STAGES, depth, 0) for depth in (0, 3))
    assert plain == pytest.approx(12 * MACHINE.keys_us(1 << 20))
    assert drafting == pytest.approx(13 * MACHINE.keys_us(1 << 20))


@settings(max_examples=15, deadline=None)
@given(
    sessions=st.integers(1, 9), depth=st.integers(0, 7), limit=st.integers(1, 6), new_tokens=st.integers(1, 40),
    acceptance=st.floats(0, 1), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_load_ends_with_every_token_and_repeats(
    sessions: int, depth: int, limit: int, new_tokens: int, acceptance: float, seed: int
) -> None:
    """No load hangs or loses a token, no pass exceeds its limit, no stage works more than all the time, and a run repeats exactly."""
    one = Load(sessions, depth, limit, 1000, new_tokens, acceptance, seed)
    outcome = simulate(MACHINE, STAGES, one)
    assert outcome.tokens == sessions * new_tokens
    assert 1 <= outcome.batch <= min(limit, sessions)
    assert all(0 < busy <= 1 for busy in outcome.busy)
    assert simulate(MACHINE, STAGES, one) == outcome
