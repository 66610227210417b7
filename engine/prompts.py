"""Prompts in any of their forms, as token ids: a text, ids, or chat messages.

Holds the tokenizer, the chat template and the size of the vocabulary. Knows no sessions, only whether the prompt continues one.
"""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import BadRequest
from engine.protocol import Prompt
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

__all__ = ["Prompts"]

_PIECE = 8192  # ids; a millisecond


class Prompts:
    """Of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocabulary = vocabulary

    async def tokens(
        self, prompt: Prompt, template_arguments: Mapping[str, object], *, continues: bool, held: Sequence[int] = ()
    ) -> "array[int]":
        """Token ids of a prompt, 4 bytes each as a session has them; long ones do not hold the loop.

        Args: continues: the session has tokens already, so what the template writes before the first turn is left out.
            held: those tokens, as far as they are known: what they begin with is not said again, be it a list of tools, nor the mark that
            they end with.
        Raises: BadRequest: it is none of the three forms, or an id is outside the vocabulary; BadModel: no tokenizer or template.
        """
        if isinstance(prompt, str):
            return await self._checked(await self._tokenizer.encode_async(prompt))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise BadRequest(f"a prompt is a text, token ids, or chat messages, not {type(prompt).__name__}", field="prompt")
        if not prompt or isinstance(prompt[0], int):
            return await self._checked(prompt)  # type: ignore[arg-type]  # it checks
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if len(messages) != len(prompt):
            raise BadRequest("a prompt is a text, token ids, or chat messages", field="prompt")
        arguments: dict[str, Any] = dict(template_arguments)
        text = self._template.render(messages, **arguments)
        if continues:
            text = text.removeprefix(await self._said(arguments, held))
        token_ids = await self._checked(await self._tokenizer.encode_async(text))
        if continues and held and token_ids and token_ids[0] == held[-1] and self._tokenizer.is_special(held[-1]):
            del token_ids[0]  # the mark that ended the last turn is the one that this turn begins with
        return token_ids

    def check_bias(self, logit_bias: Sequence[tuple[int, float]]) -> None:
        """Raises BadRequest: a bias of a token that the model does not have."""
        for token, _ in logit_bias:
            if token >= self._vocabulary:
                raise BadRequest(f"logit_bias: token id {token} is outside the vocabulary of {self._vocabulary}", field="logit_bias")

    async def _said(self, arguments: Mapping[str, Any], held: Sequence[int]) -> str:
        """What the template writes before the first turn and the session has already: tools too, if it begins with these."""
        lead = self._lead(arguments)
        if lead and arguments:
            token_ids = await self._tokenizer.encode_async(lead)
            if list(held[: len(token_ids)]) != token_ids:  # it began without these, or its first turn has not run yet
                lead = self._lead({})
        return lead

    def _lead(self, arguments: Mapping[str, Any]) -> str:
        """What the template writes before any turn; "" if it refuses to render none."""
        try:
            return self._template.render([], add_generation_prompt=False, **arguments)
        except BadRequest:
            return ""

    async def _checked(self, ids: Sequence[int]) -> "array[int]":
        """An array of its own, checked piece by piece with turns of the loop between: a million ids at once would hold it for 0.1 s."""
        checked = array("i")
        for start in range(0, len(ids), _PIECE):
            piece = ids[start : start + _PIECE]
            if not all(isinstance(token, int) for token in piece):
                raise BadRequest("a prompt is a text, token ids, or chat messages", field="prompt")
            if min(piece) < 0 or max(piece) >= self._vocabulary:
                token = next(token for token in piece if not 0 <= token < self._vocabulary)
                raise BadRequest(f"token id {token} is outside the vocabulary of {self._vocabulary}", field="prompt")
            checked.extend(piece)
            if start + _PIECE < len(ids):
                await asyncio.sleep(0)
        return checked
