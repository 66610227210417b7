"""What graphs of one recording share that run at once, each on a part of its own: flags, and the epoch of the replay they are in.

A part is what has a graph: the streams of one device, or of one role where two roles have the same device. Holds tensors and counts; the
launches that raise and await flags are the caller's, since streams know no kernels. Knows no streams.

Invariants:
1. Replays of all recordings that share a crossing come one after another, so one flag serves one edge of each.
2. All parts are in the same epoch whenever no replay runs: each graph counts it up by itself. Where only some graphs of a replay could be
   launched, every part is set to the host's count before the next.
3. A replay that lost a part ends: who waits for a flag gives up by itself, and at once where the host says that nobody comes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Crossing", "FlagWork"]

_FLAGS_MAX = 4096  # edges between parts in one recording: 6 a layer and 2 a draft, so far below
_WORDS = 8  # a flag has a line of the host's cache for itself


@dataclass(frozen=True, slots=True)
class FlagWork:
    """Launches on the current stream. Flags and `lost` are int64 [8] of which the first is used; an epoch is int64 [1]."""

    advance: Callable[[Tensor], None]  # epoch: one more
    signal: Callable[[Tensor, Tensor], None]  # flag, epoch: all work before this is done
    wait: Callable[[Tensor, Tensor, Tensor], None]  # flag, epoch, lost: go on when the flag has the epoch, or give the epoch up


class Crossing:
    """See the module's page."""

    def __init__(self, devices: Mapping[str, torch.device], work: FlagWork) -> None:
        """Args: devices: of each part, by what the names of its streams contain; "" is the first one's, which has all other names."""
        assert "" in devices, "somebody has the streams that nobody else has"
        self.devices, self.work = dict(devices), work
        pinned = any(device.type != "cpu" for device in devices.values())
        self._flags = torch.zeros((_FLAGS_MAX, _WORDS), dtype=torch.int64, pin_memory=pinned)
        self.lost = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=pinned)  # the last epoch that was given up
        self.epoch_of = {part: torch.zeros(1, dtype=torch.int64, device=device) for part, device in devices.items()}
        self._taken = 0  # flags of the recording that is being made
        self._epoch = 0  # of the replay launched last
        self._uneven = False  # whether parts may be in different epochs

    def part_of(self, name: str) -> str:
        """The part that has the stream of that name."""
        return next((part for part in self.devices if part and part in name), "")

    def restart(self) -> None:
        """A recording begins: all flags are free for it."""
        self._taken = 0

    def next_flag(self) -> Tensor:
        """For another edge of the recording."""
        assert self._taken < _FLAGS_MAX, f"a recording has more than {_FLAGS_MAX} edges between its parts"
        self._taken += 1
        return self._flags[self._taken - 1]

    def begin(self) -> Callable[[str], None]:
        """A replay begins. Returns what is called for each part, on the stream its graph is launched to, right before that."""
        self._epoch += 1
        before, uneven, self._uneven = self._epoch - 1, self._uneven, False

        def align(part: str) -> None:
            if uneven:
                self.epoch_of[part].fill_(before)

        return align

    def give_up(self) -> None:
        """Not all graphs of the replay that began last were launched: let those that were end without the others."""
        self.lost[0] = self._epoch
        self._uneven = True
