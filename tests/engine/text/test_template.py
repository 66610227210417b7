"""ChatTemplate: renders as transformers does, refuses what a template must not do, names bad files."""

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import BadModel, BadRequest
from engine.protocol import Message
from engine.text import ChatTemplate

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
USER: list[Message] = [{"role": "user", "content": "hi"}]
TALK: list[Message] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo <b>"},
    {"role": "assistant", "content": "", "reasoning_content": "hm"},
    {"role": "tool", "content": "42"},
    {"role": "user", "content": "日本\n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ünï & <x>", "parameters": {"b": 1, "a": [True, None]}}}]


def refused(source: str, **arguments: object) -> str:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source).render(USER, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        (DEMO / "chat_template.jinja").read_text(),
        "{%- for t in tools -%}\n  {{ t | tojson }}\n{%- endfor %}\n{{ tools | tojson(indent=2) }}",
        "{% for m in messages %}\n    {% if loop.first %}\n\tfirst{{ '' }}\n    {% endif %}\n"
        "{{ loop.index }}/{{ loop.length }}{{ m.role }}\n{% endfor %}\n",
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if not loop.last %}"
        "{{ m.content }}{{ loop.nextitem.role }}{% else %}{% break %}{% endif %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% endfor %}{{ ns.n }}{% for x in nothing %}x{% else %}none{% endfor %}",
        "{% macro show(items) %}{% for k, v in items.items() %}{{ k }}={{ v }};{% endfor %}{% endmacro %}"
        "{{ show(messages[0]) }}{{ messages[1:][::-1][0] }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{{ messages[0]['absent'] is defined }}{{ 'ab' * 3 }}{{ 2 ** 5 }}{{ 3 * 4 }}",
        "{{ bos_token }}{{ messages | length }}{{ add_generation_prompt }}{{ flag }}",
        "{% for c in 'añ' %}[{{ c }}]{% endfor %}{% for group in messages | groupby('role') recursive %}{{ group[0] }}{% endfor %}",
    ],
)  # fmt: skip
def test_it_renders_as_transformers_does(source: str, prompted: bool) -> None:
    """White space, JSON, loop variables, loop controls, macros and special tokens give transformers' text."""
    expected, _ = render_jinja_template(
        conversations=[[dict(message) for message in TALK]],
        chat_template=source,
        tools=TOOLS,
        add_generation_prompt=prompted,
        bos_token="<s>",
        flag=7,
    )
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.render(TALK, TOOLS, prompted, flag=7) == expected[0]


def test_the_demo_template_opens_a_turn() -> None:
    """The demo's prompt begins with the two leading marks and ends inside the assistant's reasoning, or after it when switched off."""
    template = ChatTemplate.load(DEMO)
    assert template.render(USER) == "[gMASK]<sop><|user|>hi<|assistant|><think>"
    assert template.render(USER, enable_thinking=False).endswith("<|assistant|><think></think>")
    assert template.render(USER, add_generation_prompt=False) == "[gMASK]<sop><|user|>hi"


def test_a_template_that_raises_is_a_bad_request() -> None:
    """raise_exception's message reaches the client in one line."""
    assert "roles must alternate" in refused("{{ raise_exception('roles must\nalternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}{{ raise_exception.__globals__ }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
    ],
)
def test_forbidden_attributes_are_refused(source: str) -> None:
    """Nothing leads from a template to Python's insides, and messages cannot be changed."""
    assert "refused" in refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100001) %}{% endfor %}",
        "{% set t = 'x' * 2000 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ absent.attribute }}",
        "{% include 'other' %}",
        "{{ {messages: 1} | tojson }}",
    ],
)
def test_runaway_and_failing_templates_are_refused(source: str) -> None:
    """Long loops, endless recursion, huge repetition and any Python error end in one line."""
    assert "the chat template refused" in refused(source)


def test_the_turns_of_one_rendering_do_not_count_in_the_next() -> None:
    """A template near the limit renders again and again."""
    template = ChatTemplate("{% for i in range(700) %}{% for j in range(1000) %}{% endfor %}{% endfor %}ok")
    assert [template.render(USER) for _ in range(2)] == ["ok", "ok"]


def test_deeply_nested_values_are_refused_in_one_line() -> None:
    """Recursion inside tojson ends in BadRequest."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    refused("{{ deep | tojson }}", deep=deep)


def test_there_is_no_clock() -> None:
    """A prompt is a function of its messages: strftime_now is not there."""
    assert ChatTemplate("{{ strftime_now is defined }}").render(USER) == "False"


def test_arguments_cannot_replace_what_we_pass() -> None:
    """Names of ours win over arguments of the same name."""
    template = ChatTemplate("{{ messages[0].content }}{{ documents }}")
    assert template.render(USER, documents=["x"], forebay_turns=3, self=1, messages=[]) == "hiNone"


def test_non_ascii_and_html_stay_as_they_are_in_json() -> None:
    """tojson keeps non-ASCII, order and HTML characters."""
    assert ChatTemplate("{{ v | tojson }}").render(USER, v={"z": "é<&>'", "a": 1}) == '{"z": "é<&>\'", "a": 1}'


def test_template_files_in_their_order(tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json, whose template may be a text or a list with a default."""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": "text{{ eos_token }}{{ pad_token }}", "eos_token": {"content": "</s>"}, "pad_token": "P"})
    )
    assert ChatTemplate.load(tmp_path).render(USER) == "text</s>P"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]}))
    assert ChatTemplate.load(tmp_path).render(USER) == "listed"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert ChatTemplate.load(tmp_path).render(USER) == "file é"


@pytest.mark.parametrize("config", [None, "{}", '{"chat_template": null}', '{"chat_template": [{"name": "rag", "template": "no"}]}'])
def test_an_absent_template_refuses_to_render(tmp_path: Path, config: str | None) -> None:
    """Without a template loading works and rendering names the file."""
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    template = ChatTemplate.load(tmp_path)
    assert not template.available
    with pytest.raises(BadModel, match=r"chat_template\.jinja"):
        template.render(USER)


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("chat_template.jinja", b"{% for %}", r"chat_template\.jinja: line 1"),
        ("chat_template.jinja", b"ok\n\n{{ x }", r"chat_template\.jinja: line 3"),
        ("chat_template.jinja", b"{% generation %}x", r"chat_template\.jinja: line 1"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json must hold an object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', r"tokenizer_config\.json: chat_template"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', r"tokenizer_config\.json: line 1"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, pattern: str) -> None:
    """A template or configuration that cannot be used gives one line with the file's name."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadModel, match=pattern) as caught:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_variables_are_what_the_template_reads() -> None:
    """Names that a template reads are told, its own and its loops' are not; without a template nothing is known."""
    switch = "{% if enable_thinking is defined and not enable_thinking %}{{ own }}{% endif %}"
    source = "{% set own = 1 %}{% for m in messages %}{{ m.role }}{% endfor %}" + switch
    assert ChatTemplate(source).variables == {"messages", "enable_thinking"}
    assert ChatTemplate(None).variables is None
