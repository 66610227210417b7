"""A load on a server: conversations of several turns, how long each is, and when it begins. Values and seeded draws; knows no HTTP.

1. The same load is the same conversations, ids and arrivals, every time and on any machine.
2. Lengths are exact: prompts are token ids, and answers do not stop by themselves.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Conversation", "Length", "Load", "Turn", "conversations"]

_IDS = range(1_000)  # every vocabulary in use has these


@dataclass(frozen=True, slots=True)
class Length:
    """A count of tokens, drawn evenly from `least` to `most`, both included."""

    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class Load:
    """What to send.

    rate: conversations that begin a second, at random (Poisson); None: a closed loop of `concurrency` clients, each with one conversation
    after another. shared_tokens: ids that every conversation begins with. think_s: between an answer and the next turn.
    """

    sessions: int = 32
    turns: int = 1
    prompt_tokens: Length = Length(512, 512)  # of each turn, besides what was said before
    new_tokens: Length = Length(128, 128)
    concurrency: int = 8
    rate: float | None = None
    shared_tokens: int = 0
    think_s: float = 0.0
    temperature: float = 0.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """New ids of a prompt, and tokens of its answer."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One client's turns. `begins_s`: after the start of the run; in a closed loop 0."""

    number: int
    begins_s: float
    turns: tuple[Turn, ...]

    @property
    def new_tokens(self) -> int:
        return sum(turn.new_tokens for turn in self.turns)


def conversations(load: Load) -> Iterator[Conversation]:
    """All of them, in order of their beginning."""
    shared = tuple(random.Random(f"{load.seed} shared").choices(_IDS, k=load.shared_tokens))
    arrivals = random.Random(f"{load.seed} arrivals")
    begins_s = 0.0
    for number in range(load.sessions):
        source = random.Random(f"{load.seed} {number}")
        turns = []
        for turn in range(load.turns):
            own = tuple(source.choices(_IDS, k=load.prompt_tokens.draw(source)))
            turns.append(Turn((shared if turn == 0 else ()) + own, load.new_tokens.draw(source)))
        yield Conversation(number, begins_s, tuple(turns))
        if load.rate is not None:
            begins_s += arrivals.expovariate(load.rate)
