"""A session's phases move by the table alone."""

import itertools

import pytest

from engine.protocol import SessionId
from engine.session import Phase, Session

ALLOWED = {
    ("new", "appending"), ("new", "archived"), ("new", "closed"), ("new", "broken"), ("appending", "ready"), ("appending", "broken"),
    ("ready", "appending"), ("ready", "decoding"), ("ready", "exporting"), ("ready", "archived"), ("ready", "closed"), ("ready", "broken"),
    ("decoding", "ready"), ("decoding", "broken"), ("exporting", "ready"), ("exporting", "archived"), ("exporting", "broken"),
    ("archived", "ready"), ("archived", "closed"), ("archived", "broken"), ("broken", "closed"),
}  # fmt: skip
# The shortest way to each phase.
WAYS = {
    "new": (), "appending": ("appending",), "ready": ("appending", "ready"), "decoding": ("appending", "ready", "decoding"),
    "exporting": ("appending", "ready", "exporting"), "archived": ("appending", "ready", "archived"), "broken": ("broken",),
    "closed": ("closed",),
}  # fmt: skip


@pytest.mark.parametrize(("start", "end"), list(itertools.product(WAYS, WAYS)))
def test_moves_follow_the_table(start: str, end: str) -> None:
    """An allowed move happens; any other raises and changes nothing."""
    session = Session(SessionId("s"), temporary=False)
    for phase in WAYS[start]:
        session.move(Phase(phase))
    if (start, end) in ALLOWED:
        session.move(Phase(end))
        assert session.phase is Phase(end)
    else:
        with pytest.raises(AssertionError, match="cannot go from"):
            session.move(Phase(end))
        assert session.phase is Phase(start)
