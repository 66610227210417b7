"""How large a prompt may be before anybody works on it. Knows the context's size and no tokenizer.

1. What is refused here could not have fitted: a list of more ids than the context has places, or a text of more characters than as many
   tokens can hold.
2. Costs a look at lengths, never at contents; tools alone are passed over.
"""

from collections.abc import Mapping

import msgspec

from engine.errors import TooLong
from engine.protocol import Prompt

__all__ = ["CHARACTERS_A_TOKEN_MAX", "check_prompt_size", "check_text_size", "check_tools_size"]

# English runs at about 4 and source code at about 3; only runs of blanks come near this.
CHARACTERS_A_TOKEN_MAX = 16


def check_text_size(characters: int, context_max: int, field: str = "prompt") -> None:
    """Raises TooLong with both numbers when a text cannot fit a context of `context_max` tokens."""
    limit = CHARACTERS_A_TOKEN_MAX * context_max
    if characters > limit:
        raise TooLong(
            f"{field} has {characters} characters; a context of {context_max} tokens takes at most {limit}, "
            f"{CHARACTERS_A_TOKEN_MAX} a token",
            field=field,
        )


def check_prompt_size(prompt: Prompt, context_max: int) -> None:
    """Raises TooLong, naming `prompt` or `messages`, when a prompt cannot fit a context of `context_max` tokens."""
    if isinstance(prompt, str):
        check_text_size(len(prompt), context_max)
    elif prompt and isinstance(prompt[0], Mapping):
        check_text_size(sum(map(_characters, prompt)), context_max, "messages")
    elif len(prompt) >= context_max:
        raise TooLong(
            f"prompt has {len(prompt)} tokens; a context of {context_max} tokens takes at most {context_max - 1} and a new one",
            field="prompt",
        )


def check_tools_size(tools: object, context_max: int) -> None:
    """Raises TooLong when tools, which a template writes out as JSON, cannot fit. A pass over them; None is none."""
    if tools is not None:
        check_text_size(len(msgspec.json.encode(tools)), context_max, "tools")


def _characters(message: object) -> int:
    """Of a message's content; what else it holds a template may leave out."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return len(content) if isinstance(content, str) else 0
