"""What a request asks its output to be. Values only: no library, no tokens.

1. Equal forms have equal grammars: what was compiled for one request serves the next.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["CALL_MARK", "GRAMMAR_BYTES_MAX", "REASONING_MARK", "Form"]

REASONING_MARK = "</think>"
CALL_MARK = "<tool_call>"
GRAMMAR_BYTES_MAX = 512 * 1024


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar and where in the output it holds.

    grammar: in Lark's notation as llguidance reads it, or with `notation` "ebnf" in GBNF's. field: of the request that asked for it, for
    messages. begins: "at once"; "behind reasoning": at once, but behind the reasoning where the prompt ends inside it; "at calls": behind
    each `<tool_call>`, text being free before and between them. calls: the grammar has calls, so that none may begin in free text.
    """

    grammar: str
    field: str
    begins: Literal["at once", "behind reasoning", "at calls"] = "at once"
    notation: Literal["lark", "ebnf"] = "lark"
    calls: bool = False
