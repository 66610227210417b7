"""What a gate run does: values only, checked when built."""

import re
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import BadSetting
from engine.protocol import SyntheticHistory

__all__ = ["Plan", "parse_history"]

_HISTORY = re.compile(r"synthetic:(\d{1,18}):(\d{1,12})")


def parse_history(text: str) -> SyntheticHistory:
    """`synthetic:SEED:ROWS`. Raises BadSetting."""
    found = _HISTORY.fullmatch(text)
    if found is None or int(found.group(2)) < 1:
        raise BadSetting(f"--history must be synthetic:SEED:ROWS, two numbers, not {text!r}")
    return SyntheticHistory(int(found.group(1)), int(found.group(2)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts of tokens and pairs; `limit` is a share of the resident speed. Raises BadSetting naming the flag."""

    engine: EngineConfig  # its placement is set by each run
    model: str | None  # None: the model that comes with the package
    prompt_file: Path | None = None
    prompt_tokens: int = 50_023  # without a prompt file
    new_tokens: int = 1_024
    pairs: int = 3
    null_pairs: int = 2
    limit: float = 0.0015
    warmup_tokens: int = 8  # of a short answer before the measured one, so that nothing is compiled while it is measured; 0: none
    history: SyntheticHistory | None = None
    together: bool = False  # a pair's two servers start at once: both must fit the device

    def __post_init__(self) -> None:
        at_least = {"prompt_tokens": 1, "new_tokens": 2, "pairs": 1, "null_pairs": 0, "warmup_tokens": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise BadSetting(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.limit < 1:
            raise BadSetting(f"--limit must be a percentage from 0 to below 100, not {100 * self.limit:g}")
