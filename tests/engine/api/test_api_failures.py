"""Errors as bodies."""

import json

import pytest

from engine.api import encode, error_body, error_fields
from engine.errors import BadModel, BadRequest, BadSetting, ForebayError, NeverFits, NotAdmitted, SessionBroken, TooLong, UnknownSession


@pytest.mark.parametrize(
    ("error", "status", "kind", "field"),
    [
        (BadRequest("no", field="messages[0].role"), 400, "invalid_request_error", "messages[0].role"),
        (BadRequest("no"), 400, "invalid_request_error", None),
        (BadSetting("no"), 400, "invalid_setting", None),
        (UnknownSession("no"), 404, "not_found_error", None),
        (NotAdmitted("no"), 503, "capacity_error", None),
        (NotAdmitted("no", retry_after_s=2.0), 429, "capacity_error", None),
        (SessionBroken("no"), 500, "session_broken", None),
        (BadModel("no"), 500, "invalid_model", None),
        (ForebayError("no"), 500, "internal_error", None),
    ],
)
def test_our_errors_show_their_message(error: ForebayError, status: int, kind: str, field: str | None) -> None:
    """Each error has its status and OpenAI's four fields."""
    assert error_body(error) == (status, {"error": {"message": "no", "type": kind, "param": field, "code": None}})


@pytest.mark.parametrize("error", [TooLong("no", field="prompt"), NeverFits("no")])
def test_what_is_too_long_has_the_code_that_clients_act_on(error: ForebayError) -> None:
    """Longer than the context, or than all memory: 400 and OpenAI's own code, so that clients shorten and do not try again."""
    field = getattr(error, "field", None)
    shown = {"message": "no", "type": "invalid_request_error", "param": field, "code": "context_length_exceeded"}
    assert error_body(error) == (400, {"error": shown})


@pytest.mark.parametrize(
    "error", [ValueError("secret /etc/path"), KeyError("secret"), AssertionError("secret"), MemoryError(), OSError(5, "secret")]
)
def test_other_errors_show_nothing(error: BaseException) -> None:
    """What is not ours is status 500 without its text."""
    status, body = error_body(error)
    assert status == 500
    assert "secret" not in json.dumps(body)


def test_messages_are_one_line() -> None:
    """A message with line ends becomes one line, an empty one its kind, and the body encodes."""
    _, body = error_body(BadRequest("a\n  b\tc"))
    assert json.loads(encode(body))["error"]["message"] == "a b c"
    _, empty = error_body(SessionBroken())
    assert json.loads(encode(empty))["error"]["message"] == "session_broken"


def test_a_body_can_carry_a_code() -> None:
    """Codes such as model_not_found are given by the caller."""
    body = error_fields("no such model", "not_found_error", field="model", code="model_not_found")
    assert body == {"error": {"message": "no such model", "type": "not_found_error", "param": "model", "code": "model_not_found"}}
