"""An assistant's turn parted into reasoning, content and tool calls, whole and in pieces."""

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.argument_kinds import ToolSchemas
from engine.text.reply import ReplyParser, ends_in_reasoning

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = ToolSchemas(
    {
        "read": {"type": "object", "properties": {"path": STRING, "lines": INTEGER, "all": {"type": "boolean"}}},
        "write": {"properties": {"text": STRING, "marks": {"type": "array"}, "note": {"type": ["string", "null"]}}},
        "now": None,
    }
)
BEGUN = "<tool_call>write<arg_key>text</arg_key><arg_value>"
READ = "<tool_call>read<arg_key>path</arg_key><arg_value>a.py</arg_value></tool_call>"


@dataclass
class Reply:
    """What came out, put together as a client does."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    cut: bool = False


def parted(
    *pieces: str, reasoning: bool = False, complete: bool = True, tools: ToolSchemas | None = TOOLS, calls_max: int | None = None
) -> Reply:
    parser, out = ReplyParser(reasoning=reasoning, tools=tools, calls_max=calls_max), Reply()
    found = [parser.push(piece) for piece in pieces]
    for each in (*found, parser.flush(complete=complete)):
        out.reasoning += each.reasoning
        out.content += each.content
        for call in each.calls:
            if call.name is not None:
                assert call.index == len(out.calls), "calls begin in order"
                out.calls.append((call.name, ""))
            name, arguments = out.calls[call.index]
            out.calls[call.index] = (name, arguments + call.arguments)
    out.cut = parser.cut
    assert parser.calls == len(out.calls)
    return out


def arguments(reply: Reply) -> list[object]:
    return [json.loads(text) for _, text in reply.calls]


# Reasoning and content.


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("<|assistant|><think>", True), ("<think>\n", True), ("<think></think>", False), ("<|assistant|>", False), ("", False)],
)
def test_a_prompt_tells_where_the_turn_begins(prompt: str, inside: bool) -> None:
    """A turn begins inside the reasoning where the prompt opened it and did not close it."""
    assert ends_in_reasoning(prompt) is inside


def test_reasoning_ends_at_its_first_mark() -> None:
    """A turn that begins inside the reasoning has it up to the first mark; a second mark is text."""
    assert parted("a < b</think>c</think>d", reasoning=True) == Reply("a < b", "c</think>d")


def test_reasoning_that_never_ends_is_reasoning() -> None:
    """A turn that is cut, or stops, inside its reasoning has no content."""
    for complete in (True, False):
        assert parted("still thinking </thi", reasoning=True, complete=complete) == Reply("still thinking </thi")


def test_a_turn_outside_may_open_its_reasoning_itself() -> None:
    """Where the prompt did not open it the model may, before anything else; later the mark is text."""
    assert parted("\n<think>a</think>b") == Reply("a", "b")
    assert parted("b <think>a</think>") == Reply("", "b <think>a</think>")
    assert parted("a</think>b<think>c", reasoning=True) == Reply("a", "b<think>c")


def test_a_turn_without_marks_is_content() -> None:
    """Plain text comes out as it is, blanks included."""
    assert parted("  a\n\n") == Reply("", "  a\n\n")
    assert parted(" \n") == Reply("", " \n")
    assert parted("") == Reply()


# Calls.


def test_calls_are_read_with_their_kinds_of_values() -> None:
    """Strings stay as written, other values are JSON of their kind."""
    text = (
        "I look.<tool_call>read<arg_key>path</arg_key><arg_value>12</arg_value><arg_key>lines</arg_key><arg_value>12</arg_value>"
        "<arg_key>all</arg_key><arg_value>true</arg_value></tool_call>"
    )
    reply = parted(text)
    assert (reply.content, reply.calls[0][0]) == ("I look.", "read")
    assert arguments(reply) == [{"path": "12", "lines": 12, "all": True}]


def test_several_calls_with_blanks_between() -> None:
    """Calls follow one another; blanks that stand alone around them are dropped, and a call needs no arguments."""
    reply = parted(f"done</think>\n\n{READ}\n<tool_call>now</tool_call>\n", reasoning=True)
    assert (reply.reasoning, reply.content, [name for name, _ in reply.calls]) == ("done", "", ["read", "now"])
    assert arguments(reply) == [{"path": "a.py"}, {}]


def test_blanks_around_the_parts_of_a_call() -> None:
    """Blanks around names, keys and marks are not theirs; those of a string value are."""
    reply = parted("<tool_call>\nread\n <arg_key> path </arg_key>\n<arg_value> a.py\n</arg_value>\n</tool_call>")
    assert reply.calls == [("read", '{"path": " a.py\\n"}')]


def test_text_before_between_and_after_calls_is_content() -> None:
    """Text around calls stays in order."""
    assert parted(f"a{READ} b\n{READ}c").content == "a b\nc"


def test_a_call_inside_the_reasoning() -> None:
    """A call may begin where the reasoning never ended, which goes on behind it."""
    reply = parted(f"I need it.{READ}", reasoning=True)
    assert (reply.reasoning, reply.content, arguments(reply)) == ("I need it.", "", [{"path": "a.py"}])
    reply = parted(f"hm{READ}so</think>well", reasoning=True)
    assert (reply.reasoning, reply.content) == ("hmso", "well")


def test_unicode_arguments() -> None:
    """Characters outside ASCII, quotes, line ends and marks of other kinds come out as they were written."""
    text = 'né 🙂 "q" \\ \n\t<think> </tool_call> <arg_key>'
    reply = parted(f"<tool_call>write<arg_key>text</arg_key><arg_value>{text}</arg_value></tool_call>")
    assert arguments(reply) == [{"text": text}]


def test_undeclared_tools_and_arguments_are_calls_all_the_same() -> None:
    """The client says that there is no such tool, so that the model hears of it."""
    reply = parted("<tool_call>nosuch<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>")
    assert (reply.calls[0][0], arguments(reply)) == ("nosuch", [{"x": [1]}])


def test_without_tools_nothing_is_a_call() -> None:
    """What looks like a call is text where no tools were given."""
    assert parted(READ, tools=None) == Reply("", READ)
    assert parted(READ, tools=None, reasoning=True) == Reply(READ)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>read",
        "<tool_call>read this file</tool_call>",
        "<tool_call>read<arg_value>a</arg_value></tool_call>",
        "<tool_call>read<arg_key></arg_key><arg_value>a</arg_value></tool_call>",
        "<tool_call>read<arg_key>path<arg_value>a</arg_value></tool_call>",
        "<tool_call>read<arg_key>path</arg_key>a</tool_call>",
        "<tool_call>read<arg_key>path</arg_key>",
        "<tool_call>read<arg_key>path</arg_key><arg_val",
        '<tool_call>{"name": "read", "arguments": {}}</tool_call>',
        "<tool_call>read<tool_call>",
        f"<tool_call>{'n' * 2000}</tool_call>",
        f"<tool_call>read<arg_key>{'k' * 2000}</arg_key><arg_value>1</arg_value></tool_call>",
        f"<tool_call>read{' ' * 2000}</tool_call>",
    ],
)
@pytest.mark.parametrize("reasoning", [True, False])
def test_malformed_calls_are_text(text: str, reasoning: bool) -> None:
    """What breaks off or goes wrong before a value begins is the text that it was, where it stood, and a good call behind it is read."""
    for complete in (True, False):
        alone = parted(f"x {text}", reasoning=reasoning, complete=complete)
        assert (alone.reasoning + alone.content, alone.calls) == (f"x {text}", [])
    if "</arg_key>" not in text[-10:] and not text.endswith("val"):
        followed = parted(f"x {text}{READ}", reasoning=reasoning)
        assert (followed.reasoning + followed.content, arguments(followed)) == (f"x {text}", [{"path": "a.py"}])


@pytest.mark.parametrize("text", ["<tool_call>" + "n" * 2000, "<tool_call>f<arg_key>" + "k" * 2000, "<tool_call>f" + " " * 2000])
def test_what_is_too_long_for_a_call_is_not_held(text: str) -> None:
    """A name, a key or blanks that go on without end come out as text before the turn ends."""
    assert ReplyParser(reasoning=False, tools=TOOLS).push(text).content == text


def test_a_call_that_breaks_off_is_no_whole_json() -> None:
    """A call that the length, or a stop text, cuts keeps what came, and nobody can take it for the whole."""
    begun = "<tool_call>write<arg_key>text</arg_key><arg_value>rm -rf /home"
    for rest in ("", "</arg_v", "</arg_value>", "</arg_value>\n<arg_key>note", "</arg_value></tool"):
        reply = parted(begun + rest, complete=False)
        assert reply.cut
        assert reply.calls[0][0] == "write"
        assert reply.calls[0][1].startswith('{"text": "rm -rf /home')
        with pytest.raises(json.JSONDecodeError):
            json.loads(reply.calls[0][1])


def test_a_value_of_another_kind_is_not_handed_on_in_part() -> None:
    """A part of a value that is no string could close the object: it is left out."""
    reply = parted("<tool_call>write<arg_key>marks</arg_key><arg_value>[]}", complete=False)
    assert reply.calls == [("write", '{"marks": ')]


def test_the_last_mark_may_be_missing() -> None:
    """A turn that its model ended behind a whole value has a whole call."""
    reply = parted(READ.removesuffix("</tool_call>") + "\n")
    assert (arguments(reply), reply.cut) == ([{"path": "a.py"}], False)


def test_a_call_that_goes_wrong_late_leaves_the_rest_as_text() -> None:
    """Behind a value only a key or the end may come: otherwise the call stays unfinished, and what follows is text and further calls."""
    reply = parted(READ.replace("</tool_call>", " and then </tool_call>") + READ)
    assert reply.content == " and then </tool_call>"
    assert reply.calls == [("read", '{"path": "a.py"'), ("read", '{"path": "a.py"}')]


def test_a_turn_ends_with_the_calls_it_may_have() -> None:
    """Where one call is allowed the text behind it is dropped, in any pieces, and the parser says that it has ended."""
    assert parted(f"a{READ}{READ}b", calls_max=1) == Reply("", "a", [("read", '{"path": "a.py"}')])
    parser = ReplyParser(reasoning=False, tools=TOOLS, calls_max=1)
    parser.push(READ[:-1])
    assert not parser.ended
    parser.push(">")
    assert parser.ended


def test_string_values_come_out_as_they_are_written() -> None:
    """Each piece of a string value is handed on at once, behind the call's name, whose piece has the name alone once."""
    parser = ReplyParser(reasoning=False, tools=TOOLS)
    assert parser.push("<tool_call>write<arg_key>text</arg_key>").calls == ()
    (begun,) = parser.push("<arg_value>li").calls
    assert (begun.index, begun.name, begun.arguments) == (0, "write", '{"text": "li')
    (more,) = parser.push('ne "1"\n').calls
    assert (more.name, more.arguments) == (None, 'ne \\"1\\"\\n')
    (ended,) = parser.push("</arg_value></tool_call>").calls
    assert (ended.name, ended.arguments) == (None, '"}')


# In pieces.

CASES = [
    f"a</think>b{READ}\n{READ} c",
    f"a{READ}b</think> \n{READ}",
    "x<tool_call>write<arg_key>text</arg_key><arg_value>né <tool_call> 🙂</arg_value><arg_key>marks</arg_key><arg_value>[1, 2]</arg_value>"
    "<arg_key>note</arg_key><arg_value>null</arg_value></tool_call>",
    f"<tool_call>no call<tool_call>{READ}<tool_call>read<arg_key>lines</arg_key><arg_value>1</arg_value>oops</tool_call>",
    "<think>a</think><think>b<tool_call>read<arg_key>path</arg_key><arg_value>cut",
]  # fmt: skip


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_every_cut_gives_the_same(text: str, reasoning: bool, complete: bool) -> None:
    """Cut at any one place, or at every one, a turn gives what it gives whole."""
    whole = parted(text, reasoning=reasoning, complete=complete)
    assert parted(*text, reasoning=reasoning, complete=complete) == whole
    for place in range(len(text) + 1):
        assert parted(text[:place], text[place:], reasoning=reasoning, complete=complete) == whole


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
PARTS = st.sampled_from(
    [*MARKS, *MARKS, "<", "</", "<tool", "read", "write", "path", "lines", "7", "[", "{}", '"', " ", "\n", "é🙂", "a b", READ, BEGUN, BEGUN]
)


@settings(max_examples=400)
@given(
    st.lists(PARTS, max_size=24).map("".join), st.lists(st.integers(0, 300), max_size=8), st.booleans(), st.booleans(),
    st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_any_text_in_any_pieces_gives_the_same(
    text: str, places: list[int], reasoning: bool, complete: bool, calls_max: int | None
) -> None:
    """Whatever the marks are, in whatever order, pieces change nothing, and only whole calls are whole JSON."""
    whole = parted(text, reasoning=reasoning, complete=complete, calls_max=calls_max)
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert parted(*pieces, reasoning=reasoning, complete=complete, calls_max=calls_max) == whole
    assert parted(*text, reasoning=reasoning, complete=complete, calls_max=calls_max) == whole
    if whole.cut:
        with pytest.raises(json.JSONDecodeError):
            json.loads(whole.calls[-1][1])


PLAIN = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30)
VISIBLE = PLAIN.filter(lambda text: text.strip())
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=6,
).filter(lambda value: "</arg_value>" not in json.dumps(value))
ARGUMENTS = st.fixed_dictionaries({}, optional={"text": PLAIN, "marks": JSON_VALUES.map(lambda value: [value]), "note": PLAIN | st.none()})


def rendered(name: str, values: dict[str, object]) -> str:
    """A call as the chat format writes it: strings as they are, the rest as JSON."""
    written = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values.values())
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in zip(values, written, strict=True)
    )  # fmt: skip
    return f"<tool_call>{name}{pairs}</tool_call>"


@settings(max_examples=200)
@given(PLAIN, VISIBLE, st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(1, 7))
def test_what_the_format_writes_is_read_back(reasoning: str, content: str, calls: list[dict[str, object]], size: int) -> None:
    """Reasoning, content and calls of any values, written as the chat format writes them, come back as they were."""
    text = f"{reasoning}</think>{content}" + "\n".join(rendered("write", values) for values in calls)
    reply = parted(*(text[start : start + size] for start in range(0, len(text), size)), reasoning=True)
    assert (reply.reasoning, reply.content) == (reasoning if reasoning.strip() else "", content)
    wanted = [{key: None if key == "note" and value == "null" else value for key, value in values.items()} for values in calls]
    assert arguments(reply) == wanted
