"""Sessions, scheduling, decode and append steps, the model, text, wire types and commands.

`Engine` is the public face:

    async with Engine.open(directory, EngineConfig(hot_rows=1024)) as engine:
        async for chunk in engine.generate("def parse(", Sampling(max_tokens=64)):
            print(chunk.text, end="")

Parts
    engine.py          Engine: opens a model, keeps sessions, starts generations
    generation.py      the caller's end of a request; request.py: the engine's end; chunk.py: what passes between them
    loop.py            the step loop; scheduler.py: what runs next, a plain function; session.py: the table of a session's phases
    sessions.py        the sessions that callers hold: forks, cuts, revisions; prompts.py: prompts as token ids; totals.py: the counts
    stored.py          histories that outlive their requests; prefix.py: which of them a prompt begins with
    departures.py      idle sessions that leave for the disk to make room; retention.py: how long a server keeps a session
    node/              stages on other machines, and the head that drives them; recovery.py: sessions when such a machine is lost
    http.py            what routes share; session_routes.py: /v1/sessions; service.py: the engine once it is open
    waiting_line.py    who waits, who is refused; append_queue.py: running appends
    decoding.py        who decodes, the step in flight; batches.py: buckets of buffers and their tables
    decode.py          one decode step as operations on streams; append.py: rows in bulk; rows.py: how both write a layer's rows
    chain.py           a step's order of operations
    stage_calls.py     what the last stage asks of those before; follower.py: done in this process; joint.py: a session on all stages
    stage.py           layers of one device with their memory and streams; sampling_table.py: parameters of a step's places
    model/ text/ api/ archive/ commands/   the model, tokens and templates, wire types, sessions in directories, subcommands

Invariants
    1. The phase comes from the session's state, never from a row count.
    2. Only the step loop awaits device work; scheduling decides without waiting.
    3. Settings are frozen values made by the caller; nothing below reads the environment.
"""

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.sampling import Sampling

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["Engine", "EngineConfig", "Sampling"]


def __getattr__(name: str) -> object:
    """`Engine` is imported when first asked for: the command line answers --help without loading torch."""
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
