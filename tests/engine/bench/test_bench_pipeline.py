"""`forebay bench pipeline`: what several stages keep of one stage's rate."""

from pathlib import Path

import pytest

from engine.bench.pipeline import Plan, as_json, measure, table
from engine.errors import BadSetting
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_two_stages_keep_the_rate_of_one(tmp_path: Path) -> None:
    """Four sessions in two lanes, in virtual time and in tokens a second of CPU time. What does not depend on layers weighs twice here what
    it does in the packaged model, which keeps nine tenths and more (docs/bench.md)."""
    plan = Plan(make_checkpoint(tmp_path, "shared"), "2", sessions=4, tokens=44, pairs=3)
    found = await measure(plan, small())
    assert found is not None, "tokens differ"
    assert found.virtual_ratio >= 0.85, table(found)
    assert found.cpu_ratio >= 0.85, [(one.tokens_per_cpu_s, cut.tokens_per_cpu_s) for one, cut in found.cpu]
    assert min(found.virtual[1].busy) > 0.7
    assert found.drawn.startswith(b"<svg")
    assert as_json(plan, found, {})["virtual_ratio"] == found.virtual_ratio


async def test_sessions_that_never_decode_together_are_one_line(tmp_path: Path) -> None:
    """Too few tokens to saturate anything are refused with what would do."""
    with pytest.raises(BadSetting, match="ask for more --tokens"):
        await measure(Plan(make_checkpoint(tmp_path, "shared"), "2", sessions=2, tokens=2, pairs=1), small())
