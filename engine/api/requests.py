"""What clients may send: the bodies of the chat, completion and tokenize endpoints, decoded and checked.

Holds the request types and their checks. Knows neither the engine's objects (`translate.py`) nor HTTP; the size of a body is limited
before it comes here.

1. A decoded request can be served as far as its own fields tell: a wrong type, an impossible combination or a field that would be
   answered wrongly if it were ignored raises BadRequest with the field's path (`messages[0].role`).
2. Fields that we do not know are ignored, and `null` means "not given" for every optional field.
3. Numbers are finite: JSON has no NaN, and a number outside float64 is refused.
4. Lists whose every element costs something are short, and no message repeats more than about 100 characters of what was sent.
"""

import re
from collections.abc import Sized
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from engine.api.tools import check_tool_choice, check_tools
from engine.errors import BadRequest, shown
from engine.sampling import STOP_TOKENS_MAX, STOPS_MAX

__all__ = [
    "ChatMessage", "ChatRequest", "CompletionRequest", "ContentPart", "FunctionCall", "GenerationRequest", "SessionTurn",
    "StreamOptions", "SyntheticRows", "Thinking", "TokenizeRequest", "ToolCall", "check_chat", "decode", "parse_chat", "parse_completion",
    "parse_tokenize",
]  # fmt: skip

_NESTING_MAX = 64  # of values that we pass on undecoded; templates recurse over them
_TOP_LOGPROBS_MAX = 20
_MESSAGES_MAX = 4_096
_PARTS_MAX = 4_096  # of one message
_CHOICES_MAX = 16
_BIASES_MAX = 1_024
_REASON_MAX = 120  # characters of a sentence of the JSON library, which may quote a value

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only text parts are served."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call in an assistant's earlier turn; arguments are JSON text, as OpenAI sends them, or already an object."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class SyntheticRows(msgspec.Struct, kw_only=True):
    """Made-up rows before the prompt, for measuring; only a server that was told to serves them."""

    seed: Annotated[int, msgspec.Meta(ge=0)]
    rows: Annotated[int, msgspec.Meta(ge=1)]


class SessionTurn(msgspec.Struct, kw_only=True):
    """The session a request continues: its messages or prompt are the new ones only. `revision`: refused if it is at another."""

    id: str
    revision: Annotated[int, msgspec.Meta(ge=0)] | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share. Extensions carry the names vLLM gave them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    draft_depth: int | None = None  # most drafts a step for this request; changes no token
    priority: int | None = None  # among requests of the same key; changes no token
    return_token_ids: bool | None = None
    session: SessionTurn | None = None
    synthetic_history: SyntheticRows | None = None
    response_format: dict[str, object] | None = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None


class Thinking(msgspec.Struct, kw_only=True):
    """How GLM's own service spells the switch of the reasoning: "disabled", or anything else for on."""

    type: str
    clear_thinking: bool | None = None  # whether the prompt leaves out the reasoning of earlier turns


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    functions: object = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None
    web_search_options: object = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a text, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    return_token_strs: bool | None = None


_Request = TypeVar("_Request", bound=msgspec.Struct)


def parse_chat(body: bytes) -> ChatRequest:
    """Decode and check a body of /v1/chat/completions. Raises BadRequest naming the field."""
    return check_chat(decode(body, ChatRequest))


def check_chat(request: ChatRequest) -> ChatRequest:
    """A decoded chat, or one that another endpoint's request was made into, as it is. Raises BadRequest naming the field."""
    _check_shared(request)
    _check_messages(request.messages)
    _check_nesting(request.chat_template_kwargs, "chat_template_kwargs")
    check_tools(request.tools, "tools")
    check_tool_choice(request.tool_choice, request.tools)
    _check_nesting(request.tools, "tools")
    for field in ("functions", "function_call"):
        if getattr(request, field) is not None:
            raise BadRequest(f"{field} is not served: send tools and tool_choice", field=field)
    for field in ("audio", "web_search_options"):
        if getattr(request, field) is not None:
            raise BadRequest(f"{field} is not served: leave it out", field=field)
    if request.modalities not in (None, [], ["text"]):
        raise BadRequest("modalities must be ['text']: nothing else is generated", field="modalities")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise BadRequest(
            f"max_tokens ({shown(request.max_tokens)}) and max_completion_tokens ({shown(request.max_completion_tokens)}) disagree: "
            "send one",
            field="max_completion_tokens",
        )
    _check_at_least_one(request.max_completion_tokens, "max_completion_tokens")
    if request.top_logprobs is not None:
        if not 0 <= request.top_logprobs <= _TOP_LOGPROBS_MAX:
            raise BadRequest(
                f"top_logprobs must be between 0 and {_TOP_LOGPROBS_MAX}, not {shown(request.top_logprobs)}", field="top_logprobs"
            )
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a body of /v1/completions. Raises BadRequest naming the field."""
    request = decode(body, CompletionRequest)
    _check_shared(request)
    _check_prompt(request.prompt)
    if request.best_of not in (None, request.n or 1):
        raise BadRequest("best_of is not served: every answer that is generated is returned; send n", field="best_of")
    if request.echo and request.logprobs is not None:
        raise BadRequest("echo goes without logprobs: there are none of the prompt", field="echo")
    if request.suffix:
        raise BadRequest("suffix is not served: the model continues the prompt only", field="suffix")
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Decode and check a body of /tokenize: exactly one of `prompt` and `messages`. Raises BadRequest naming the field."""
    request = decode(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("send exactly one of prompt and messages", field="prompt")
    if request.messages is not None:
        _check_messages(request.messages)
    _check_nesting(request.chat_template_kwargs, "chat_template_kwargs")
    check_tools(request.tools, "tools")
    _check_nesting(request.tools, "tools")
    return request


def _check_shared(request: GenerationRequest) -> None:
    if not 1 <= (1 if request.n is None else request.n) <= _CHOICES_MAX:
        raise BadRequest(f"n must be between 1 and {_CHOICES_MAX}, not {shown(request.n)}", field="n")
    for owner in ("session", "synthetic_history"):
        if request.n not in (None, 1) and getattr(request, owner) is not None:
            raise BadRequest(f"n must be 1 with {owner}, which goes on in one way only: fork the session instead", field="n")
    _check_length(request.logit_bias or (), _BIASES_MAX, "logit_bias")
    for field in ("response_format", "structured_outputs", "guided_json", "guided_choice"):
        _check_nesting(getattr(request, field), field)
    if request.session is not None and request.synthetic_history is not None:
        raise BadRequest("synthetic_history begins a session of its own: leave session out", field="synthetic_history")
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream to be true", field="stream_options")
    _check_at_least_one(request.max_tokens, "max_tokens")
    for field, given, most in (("stop", request.stop, STOPS_MAX), ("stop_token_ids", request.stop_token_ids, STOP_TOKENS_MAX)):
        if isinstance(given, list):
            _check_length(given, most, field)


def _check_length(given: Sized, most: int, field: str) -> None:
    if len(given) > most:
        raise BadRequest(f"{field} holds {len(given)}, more than {most}", field=field)


def _check_at_least_one(value: int | None, field: str) -> None:
    if value is not None and not 1 <= value < 2**31:
        raise BadRequest(f"{field} must be an integer of at least 1, below 2^31, not {shown(value)}", field=field)


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise BadRequest("messages must hold at least one message", field="messages")
    _check_length(messages, _MESSAGES_MAX, "messages")
    for index, message in enumerate(messages):
        for call in message.tool_calls or ():
            _check_nesting(call.function.arguments, f"messages[{index}].tool_calls")
        if not isinstance(message.content, list):
            continue
        _check_length(message.content, _PARTS_MAX, f"messages[{index}].content")
        for place, part in enumerate(message.content):
            field = f"messages[{index}].content[{place}]"
            if part.type != "text":
                raise BadRequest(f"{field}: parts of type {part.type[:40]!r} are not served, only 'text'", field=field)
            if part.text is None:
                raise BadRequest(f"{field}: a text part needs text", field=f"{field}.text")


def _check_prompt(prompt: str | list[int | str | list[int]]) -> None:
    """One prompt: a text, token ids, or a list that holds one of either."""
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise BadRequest("prompt mixes texts, token ids and lists", field="prompt")
        if len(prompt) > 1 and kinds != {int}:
            raise BadRequest(f"prompt holds {len(prompt)} prompts: one a request", field="prompt")
    if not prompt or not (isinstance(prompt, str) or isinstance(prompt[0], int) or prompt[0]):
        raise BadRequest("prompt must not be empty", field="prompt")


def _check_nesting(value: object, field: str) -> None:
    """Without recursion: that is what it guards against."""
    level: list[object] = [value]
    for _ in range(_NESTING_MAX + 1):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return
        level = deeper
    raise BadRequest(f"{field} is nested deeper than {_NESTING_MAX} levels", field=field)


def decode(body: bytes, kind: type[_Request]) -> _Request:
    """A body as its type, unchecked otherwise. Raises BadRequest with the field's path."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except UnicodeError as error:
        raise BadRequest("the body is not valid UTF-8") from error


def _refusal(message: str) -> BadRequest:
    """msgspec's sentence as ours: ``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected `int`, got `str` ``."""
    text, _, path = message.partition(" - at `$")
    field = path.rstrip("`").lstrip(".").replace("[...]", "")
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return BadRequest(f"{field} is required", field=field)
    text = text[0].lower() + text[1:]
    if len(text) > _REASON_MAX:
        text = f"{text[:_REASON_MAX]}..."
    return BadRequest(f"{field}: {text}" if field else f"the body: {text}", field=field or None)
