"""Requests as the engine's values: sampling, messages, prompts and template arguments.

Pure functions over checked requests. Knows neither tokens nor templates: rendering and encoding are `engine/text`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

import msgspec

from engine.api.forms import form_of
from engine.api.requests import ChatMessage, ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest, ToolCall
from engine.api.tools import shown_tools
from engine.errors import BadRequest, shown
from engine.protocol import Message, SyntheticHistory
from engine.sampling import Sampling

__all__ = ["template_arguments", "to_history", "to_messages", "to_prompt", "to_sampling", "to_samplings", "wants_usage"]

_DEFAULTS = Sampling()
# Arguments of `ChatTemplate.render` that a client may not replace through chat_template_kwargs.
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})
_CUT_ARGUMENTS = "arguments"  # the one argument of an earlier call whose arguments are no whole JSON: their text
# OpenAI's levels of effort by those of the templates, which take what they do not know for the most.
_EFFORT_OF = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}


def to_sampling(request: ChatRequest | CompletionRequest, defaults: Sampling = _DEFAULTS) -> Sampling:
    """The request's sampling; what it leaves out comes from `defaults` (a model's generation_config.json).

    Raises: BadRequest: a value out of range, naming the field.
    """
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    given: dict[str, object] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,  # -1 is how vLLM spells "off"
        "min_p": request.min_p,
        "seed": request.seed,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop": stop or None,
        "stop_token_ids": tuple(request.stop_token_ids or ()) or None,
        "ignore_eos": request.ignore_eos,
        "draft_depth": request.draft_depth,
        "priority": request.priority,
        "include_stop": request.include_stop_str_in_output,
        "logprobs": _logprobs(request),
        "logit_bias": _logit_bias(request.logit_bias),
        "form": form_of(request),
    }
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    return replace(defaults, **{field: value for field, value in given.items() if value is not None})  # type: ignore[arg-type]


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """Chat: a switch and a count. Completions: a count, 0 for the chosen token alone."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _logit_bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    """By token id, in order. Raises BadRequest: a key that is no id."""
    for key in given or ():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadRequest(f"logit_bias: {shown(key)} is no token id", field="logit_bias")
    return tuple(sorted((int(key), value) for key, value in given.items())) if given else None


def to_samplings(request: ChatRequest | CompletionRequest, defaults: Sampling = _DEFAULTS) -> list[Sampling]:
    """The sampling of every choice: a seed counts up from choice to choice, or all would say the same. Raises as `to_sampling`."""
    sampling = to_sampling(request, defaults)
    if sampling.seed is None:
        return [sampling] * (request.n or 1)
    wrapped = (((sampling.seed + index + 2**63) % 2**64) - 2**63 for index in range(request.n or 1))
    return [replace(sampling, seed=seed) for seed in wrapped]


def wants_usage(request: GenerationRequest) -> bool:
    """Whether a stream ends with a usage chunk."""
    return bool(request.stream_options and request.stream_options.include_usage)


def to_history(request: GenerationRequest, *, allowed: bool) -> SyntheticHistory | None:
    """The made-up history a request begins with. Raises BadRequest when it asks for one that is not `allowed`."""
    if request.synthetic_history is None:
        return None
    if not allowed:
        raise BadRequest("this server was not started with --synthetic-history: leave it out", field="synthetic_history")
    return SyntheticHistory(request.synthetic_history.seed, request.synthetic_history.rows)


def to_prompt(request: CompletionRequest) -> str | list[int]:
    """The one prompt of a checked request: a text or token ids."""
    prompt = request.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return prompt[0]
    return cast("str | list[int]", prompt)  # all elements have the first one's type, checked when parsed


def to_messages(request: ChatRequest | TokenizeRequest) -> list[Message]:
    """Messages as a chat template reads them.

    Content is always text: text parts are put together as they stand, with nothing between them, as the model's own template does;
    null becomes "". `developer` becomes `system`. Arguments of earlier calls become objects; text that is no whole JSON becomes the one
    argument of such a call. Raises: BadRequest: arguments that are JSON of another kind.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages or ())]


def _message(message: ChatMessage, field: str) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content)
    out: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if getattr(message, name) is not None:
            out[name] = getattr(message, name)
    if message.tool_calls:
        out["tool_calls"] = [_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)]
    return out


def _call(call: ToolCall, field: str) -> dict[str, object]:
    arguments: object = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            # A call that was cut off is not whole, and refusing it would end the conversation that has it: the model sees what there was.
            arguments = {_CUT_ARGUMENTS: arguments}
        if not isinstance(arguments, dict):
            raise BadRequest(f"{field}.function.arguments must be a JSON object", field=f"{field}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}


def template_arguments(request: ChatRequest | TokenizeRequest, variables: Collection[str] | None = None) -> Mapping[str, object]:
    """Variables of the chat template besides the messages: tools, and how much to reason. What chat_template_kwargs say comes first.

    Args: variables: those that the template reads; None: not known.
    Raises: BadRequest: names that are the template call's own, an unknown effort, or reasoning switched off that cannot be.
    """
    given = dict(request.chat_template_kwargs or {})
    for name in sorted(_OURS & given.keys()):
        raise BadRequest(f"chat_template_kwargs must not hold {name}", field="chat_template_kwargs")
    arguments, field = _reasoning(request) if isinstance(request, ChatRequest) else ({}, "")
    if given.get("enable_thinking") is False:
        field = "chat_template_kwargs"
    arguments |= given
    if arguments.get("enable_thinking") is False and variables is not None and "enable_thinking" not in variables:
        raise BadRequest(f"{field}: this model's reasoning cannot be switched off; ask for less by reasoning_effort 'low'", field=field)
    tools = shown_tools(request.tools, request.tool_choice if isinstance(request, ChatRequest) else None)
    return arguments | {"tools": tools} if tools else arguments


def _reasoning(request: ChatRequest) -> tuple[dict[str, object], str]:
    """What a request's own fields say about reasoning, and the field that switches it."""
    arguments: dict[str, object] = {}
    field = ""
    if request.thinking is not None:
        arguments["enable_thinking"], field = request.thinking.type != "disabled", "thinking"
        if request.thinking.clear_thinking is not None:
            arguments["clear_thinking"] = request.thinking.clear_thinking
    effort = request.reasoning_effort
    if effort == "none":
        arguments["enable_thinking"], field = False, "reasoning_effort"
    elif effort is not None:
        if effort not in _EFFORT_OF:
            raise BadRequest(
                f"reasoning_effort must be one of none, {', '.join(_EFFORT_OF)}, not {shown(effort)}", field="reasoning_effort"
            )
        arguments["reasoning_effort"] = _EFFORT_OF[effort]
    return arguments, field
