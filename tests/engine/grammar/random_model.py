"""A tiny random model with the demo's tokenizer and chat template: at temperature 1 it writes rubbish, so what is valid was made so."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.api import parse_chat, template_arguments, to_messages, to_sampling
from engine.api.tools import schemas_of, shown_tools
from engine.engine import Engine
from engine.text.reply import ReplyParser, ReplyPiece, ends_in_reasoning
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

__all__ = ["CALL", "DEMO", "END", "THINK_END", "Turn", "random_model", "turn"]

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo_model"
THINK_END, CALL, END = 2038, 2039, 2034  # token ids of </think>, <tool_call>, <|user|>


@dataclass(frozen=True)
class Turn:
    """What one chat turn gave."""

    parts: ReplyPiece
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str

    @property
    def calls(self) -> list[tuple[str | None, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.parts.calls]


def random_model(directory: Path) -> Path:
    """Write the model; returns its directory."""
    ends = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    config = tiny_config(vocab_size=2048, eos_token_id=ends)
    write_checkpoint(random_tensors(config, 5), config, directory)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, directory / name)
    return directory


async def turn(engine: Engine, *, reasoning: bool = False, **fields: Any) -> Turn:
    """One chat turn at temperature 1, with the fields of a request's body."""
    thinking = {} if reasoning else {"chat_template_kwargs": {"enable_thinking": False}}
    body = {"messages": [{"role": "user", "content": "go"}], "temperature": 1.0, "max_tokens": 300, **thinking, **fields}
    asked = parse_chat(msgspec.json.encode(body))
    arguments = template_arguments(asked, engine.template.variables)
    generation = engine.generate(to_messages(asked), to_sampling(asked), template_arguments=arguments)
    done = await generation.complete()
    prompt = engine.tokenizer.decode((await generation.prompt())[-16:])
    parser = ReplyParser(reasoning=ends_in_reasoning(prompt), tools=schemas_of(shown_tools(asked.tools, asked.tool_choice)))
    parts = parser.push(done.text).plus(parser.flush(complete=done.finish_reason == "stop"))
    return Turn(parts, done.text, done.token_ids, done.finish_reason)
