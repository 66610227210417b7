"""Text in and out: tokenizer, chat template, incremental decoding, stop strings.

Parts: `tokenizer.py` (text to ids, ids to bytes), `template.py` (messages to text), `detokenizer.py` (ids to text, a few at a time),
`stop.py` (stop strings in that text), `reply.py` (an assistant's turn as reasoning, content and tool calls), `argument_kinds.py` (values of
those calls by their schemas). None of them knows a model, a session or a request.

Chosen:
- Long texts are encoded on a thread: the tokenizer's batch call releases the interpreter lock. On 1.7 million characters of Python source
  (two cores) the loop was held 12 ms of 1.2 s, against all of 2.0 s with the plain call; a process would add start-up and copies.
- Detokenising goes by bytes, not by decoding the ids again with a window: linear, exact, and it needs no rule for when a window is safe.
- A stop is found at the character that completes it; waiting for a longer one would hold back text that the client asked to be cut.
"""

from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopScanner
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopScanner", "Tokenizer"]
