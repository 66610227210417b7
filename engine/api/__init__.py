"""The wire: OpenAI-shaped requests and answers, and their translation to and from the engine's values.

Parts: `bodies.py` takes off what a client compressed, `requests.py` decodes and checks bodies, `tools.py` checks and chooses tools,
`forms.py` and `call_grammar.py` say what form the output must have,
`limits.py` refuses prompts that cannot fit by their lengths, `translate.py` makes sampling, messages and prompts of requests,
`responses.py` is the shape of what goes out, `chat_choice.py` and `completion_choice.py` fill it from generated chunks with what
`chunks.py` has for both, `dialects.py` is each endpoint's way; `parts.py` with `response_*.py` is `/v1/responses` and with `message_*.py`
`/v1/messages`, `sessions.py` is what `/v1/sessions` takes and answers, `failures.py` turns exceptions into bodies. No HTTP here.

Chosen:
- A field that we know and cannot serve (best_of, audio, an unknown choice of tools) is refused with a line that says so; ignoring it
  would answer another question than the one asked. Fields we do not know are ignored. docs/api.md lists them.
- Without a maximum the engine's default applies, on both endpoints; OpenAI's 16 for completions surprises everybody.
- Text parts of one message are put together with nothing between them, which is what the model's template does with them.
- msgspec decodes and checks types in one pass: no second model of the same fields.
"""

from engine.api.bodies import decompress
from engine.api.chunks import AnswerHead, usage_counts
from engine.api.failures import error_body, error_fields
from engine.api.limits import check_prompt_size, check_text_size, check_tools_size
from engine.api.requests import ChatRequest, CompletionRequest, TokenizeRequest, parse_chat, parse_completion, parse_tokenize
from engine.api.responses import ModelCard, ModelList, SessionState, TokenizeAnswer, encode, encode_tokenized
from engine.api.sessions import (
    SessionDeleted,
    SessionList,
    encode_session,
    parse_fork,
    parse_import,
    parse_nothing,
    parse_truncate,
    session_card,
    unknown_include,
)  # fmt: skip
from engine.api.translate import template_arguments, to_history, to_messages, to_prompt, to_sampling, to_samplings, wants_usage

__all__ = [
    "AnswerHead", "ChatRequest", "CompletionRequest", "ModelCard", "ModelList", "SessionDeleted", "SessionList", "SessionState",
    "TokenizeAnswer", "TokenizeRequest", "check_prompt_size", "check_text_size", "check_tools_size", "decompress", "encode",
    "encode_session", "encode_tokenized", "error_body", "error_fields", "parse_chat", "parse_completion", "parse_fork", "parse_import",
    "parse_nothing", "parse_tokenize", "parse_truncate", "session_card", "template_arguments", "to_history", "to_messages", "to_prompt",
    "to_sampling", "to_samplings", "unknown_include", "usage_counts", "wants_usage",
]  # fmt: skip
