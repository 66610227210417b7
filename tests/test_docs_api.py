"""The tables of docs/api.md: each field that the server knows is there, and no other."""

import re
from pathlib import Path

import pytest

from engine.api.message_requests import MessagesRequest
from engine.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from engine.api.response_requests import ResponsesRequest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()


def fields_under(title: str) -> list[str]:
    """Names in the first column of the table under a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Fields of both endpoints", GenerationRequest),
        ("Chat", ChatRequest),
        ("Completions", CompletionRequest),
        ("Responses", ResponsesRequest),
        ("Messages", MessagesRequest),
    ],
)
def test_the_tables_hold_the_servers_fields(title: str, kind: type[GenerationRequest]) -> None:
    """Each table names the fields of its type that both endpoints do not share, each once."""
    shared = () if kind is GenerationRequest else GenerationRequest.__struct_fields__
    assert sorted(fields_under(title)) == sorted(set(kind.__struct_fields__) - set(shared))
