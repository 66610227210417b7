"""What can go wrong with memory that is nobody's bug. Messages give the numbers compared.

Knows nothing of HTTP or of sessions' lives: `engine` turns these into its own errors at its boundary.
"""

__all__ = ["ArenaFull", "BarrierFailed", "CopybackInFlight", "DoesNotFit", "PoolExhausted", "RegistrationRefused", "RingOverrun"]


class DoesNotFit(Exception):
    """Not admitted: bytes missing per tier, 0 where enough is left. Nothing was taken."""

    def __init__(self, *, host_missing_bytes: int = 0, device_missing_bytes: int = 0) -> None:
        self.host_missing_bytes = host_missing_bytes
        self.device_missing_bytes = device_missing_bytes
        tiers = ((host_missing_bytes, "host"), (device_missing_bytes, "device"))
        super().__init__(", ".join(f"{missing} bytes of {tier} memory missing" for missing, tier in tiers if missing > 0))


class ArenaFull(DoesNotFit):
    """The arena has too few blocks that are neither taken nor reserved."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(host_missing_bytes=missing_bytes)
        self.missing_bytes = missing_bytes


class PoolExhausted(DoesNotFit):
    """The device budget has too few bytes that are neither taken nor reserved."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(device_missing_bytes=missing_bytes)
        self.missing_bytes = missing_bytes


class RingOverrun(Exception):
    """Rows would be written over ring rows that are not known to be in the mirror, or over an append ring in use."""


class CopybackInFlight(Exception):
    """A truncation below submitted rows came before their copyback completed: await `operations.settle()` first."""


class BarrierFailed(Exception):
    """After the barrier's copies, mirrored and logical rows or the bytes themselves differ. Nothing may be exported."""


class RegistrationRefused(Exception):
    """Host memory cannot be made readable by the device. One line: the numbers, and what to change."""
