"""Chat messages to the prompt text, by the checkpoint's own Jinja template.

Holds the compiled template. Knows no tokens. The template comes with the model and is run in a sandbox all the same; what clients send
are its variables only.

1. It renders as transformers renders it: trim_blocks, lstrip_blocks, loop controls, `tojson` that keeps non-ASCII, `raise_exception`,
   the generation tag (its body), special tokens by name. There is no clock: a prompt is a function of its messages.
2. Whatever goes wrong while rendering is BadRequest with one line, also a loop of more than a million turns in all.
3. A directory without a template gives an absent one, which refuses to render.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import BadModel, BadRequest
from engine.protocol import Message

__all__ = ["ChatTemplate"]

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_TURNS_MAX = 1_000_000  # of all loops of one rendering
_RESULT_MAX = 1_000_000  # elements, or bits of a number, that one `*` or `**` may make
_TURNS = "forebay_turns"  # the variable that counts them
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One checkpoint's chat template. Build with `load`."""

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str] | None = None, name: str = _TEMPLATE_FILE) -> None:
        """Args: source: Jinja text; None: absent. name: its file, for messages. Raises: BadModel: not a template."""
        self._special_tokens = dict(special_tokens or {})
        self._hash = hashlib.sha256((source or "").encode()).hexdigest()
        self._template = None
        self._variables: frozenset[str] | None = None
        if source is not None:
            try:
                environment = _environment()
                self._template = environment.from_string(source)
                self._variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            except (TemplateError, RecursionError) as error:
                line = error.lineno if isinstance(error, TemplateSyntaxError) else 0
                raise BadModel(f"{name}: line {line}: {_one_line(error)}") from error

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `chat_template.jinja`, else the template in `tokenizer_config.json`. Raises: BadModel: there but not usable."""
        config = _config(directory / _CONFIG_FILE)
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        path = directory / _TEMPLATE_FILE
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), special_tokens=tokens)
            except (OSError, UnicodeError) as error:
                raise BadModel(f"{_TEMPLATE_FILE} cannot be read: {_one_line(error)}") from error
        return cls(_configured(config.get("chat_template")), special_tokens=tokens, name=_CONFIG_FILE)

    @property
    def available(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    @property
    def variables(self) -> frozenset[str] | None:
        """Names that the template reads and does not set itself; None if absent."""
        return self._variables

    def hash(self) -> str:
        """SHA-256 of the template's text in hexadecimal."""
        return self._hash

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: object,
    ) -> str:
        """The prompt text.

        Args: add_generation_prompt: end where the assistant's answer begins. arguments: further variables of the template.
        Raises: BadModel: no template. BadRequest: the template refused, or failed on, these messages.
        """
        if self._template is None:
            raise BadModel(f"the model directory has no chat template ({_TEMPLATE_FILE}): send a prompt instead of messages")
        variables: dict[str, object] = {**self._special_tokens, **arguments}
        variables |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables[_TURNS] = _Turns()
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can fail in any way; none of them may be taken for our own failure
            raise BadRequest(f"messages: the chat template refused them: {_one_line(error)}", field="messages") from error


class _Turns:
    """Counts the turns of every loop of one rendering."""

    def __init__(self) -> None:
        self._left = _TURNS_MAX

    def metered(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            if self._left == 0:
                raise TemplateError(f"its loops run more than {_TURNS_MAX} turns")
            self._left -= 1
            yield item


@jinja2.pass_context
def _metered(context: Context, items: Iterable[object]) -> Iterable[object]:
    turns = context.get(_TURNS)
    assert isinstance(turns, _Turns), "a template is rendered by ChatTemplate only"
    metered = turns.metered(items)
    # Loop variables such as loop.last and loop.length want to know the size of what has one.
    return list(metered) if isinstance(items, Sequence | Mapping | range) else metered


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with loops metered and repetition bounded: either could hold the loop or fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "forebay_metered", [], [], None, None, lineno=loop.lineno)
        return tree.set_environment(self)  # type: ignore[return-value]  # returns the node itself

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if _result_size(operator, left, right) > _RESULT_MAX:
            raise TemplateError(f"{operator!r} would make something too large")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: object, right: object) -> int:
    """At least the elements or bits of what `*` or `**` would make; 0 for operands that make nothing large."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    for one, other in ((left, right), (right, left)):
        if operator == "*" and isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
            return len(one) * other
    return 0


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.filters["forebay_metered"] = _metered
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML and sorts; a prompt wants neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _config(path: Path) -> Mapping[str, object]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadModel(f"{path.name} cannot be read: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{path.name} must hold an object")
    return config


def _configured(value: object) -> str | None:
    """The template of `tokenizer_config.json`: a text, or a list of named ones of which `default` counts."""
    if isinstance(value, list):
        value = next((item.get("template") for item in value if isinstance(item, dict) and item.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise BadModel(f"{_CONFIG_FILE}: chat_template must be a text or a list of named texts")
    return value


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
