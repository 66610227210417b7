"""What a decode step reads from and writes to its sessions' device state, through the step table.

The public faces of `kernels/step/reference.py`; a device without a kernel is refused. No host value passes through here: positions,
tokens and counts come from the state, so a captured step replays unchanged.
"""

from kernels.step.reference import advance, load_hidden, snapshot, store_hidden

__all__ = ["advance", "load_hidden", "snapshot", "store_hidden"]
