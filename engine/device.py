"""Where an engine runs, and the streams of that place. Chosen once, when an engine is opened."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.errors import BadSetting, DeviceFailed
from streams import Backend, CpuBackend, DeviceLost, Event, Observer

__all__ = ["check_device", "device_failure", "device_of", "leave", "named_failure", "reported_failure", "streams_of", "was_left"]

_SILENCE_S_MAX = 120.0  # no operation takes so long, the longest on a slow card some seconds
_LEFT: list[object] = []


def leave(*held: object) -> None:
    """Keep what is on a device that failed until the process ends: to free it would be to ask the device, which may hang."""
    _LEFT.extend(held)


def was_left() -> bool:
    """Whether a device has failed in this process, and what is on it was left."""
    return bool(_LEFT)


def check_device(lost: Event[None], *held: object) -> None:
    """Raise DeviceFailed if the device has failed. Args: held: what is left then."""
    if lost.done():
        leave(*held)
        raise DeviceFailed(str(lost.error()))


@contextmanager
def named_failure(lost: Event[None]) -> Iterator[None]:
    """What fails in the block because the device did fails with DeviceFailed, whatever it met."""
    try:
        yield
    except Exception as error:
        failed = device_failure(error, lost)
        if failed is None:
            raise
        raise failed from error


def device_failure(error: BaseException, lost: Event[None]) -> DeviceFailed | None:
    """What an error, or the cancellation of the step loop, is if the device is why: it failed (`lost`), or reported this one outside of
    its streams. None: it is not."""
    if isinstance(error, Exception | asyncio.CancelledError) and lost.done():
        return DeviceFailed(str(lost.error()))
    return reported_failure(error)


def reported_failure(error: BaseException) -> DeviceFailed | None:
    """What an error is if a device reported it where no engine is: while a model is loaded, or to a measurement. None: none did."""
    if isinstance(error, DeviceLost):
        return DeviceFailed(str(error))
    if isinstance(error, torch.AcceleratorError):
        return DeviceFailed(f"the device reported an error: {str(error).splitlines()[0]}")
    return None


def device_of(config: EngineConfig) -> torch.device:
    """Where the model runs. Raises BadSetting: there is no such device."""
    present = torch.cuda.is_available()
    if config.device == "cuda" and not present:
        raise BadSetting("device cuda: no GPU is usable here (forebay doctor says what it sees); use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if present and config.device != "cpu" else torch.device("cpu")


def streams_of(
    device: torch.device, observer: Observer | None, *, timed: bool = False, peer: torch.device | None = None
) -> Backend:  # fmt: skip
    """The device's own streams, and those of a stage's peer. Args: timed: see `DeviceBackend`."""
    if device.type == "cpu":
        return CpuBackend(observer)
    from streams.device import DeviceBackend

    # Sums of a row must not depend on how a library splits them, nor be rounded to less than the dtype says.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return DeviceBackend(device, observer, timed=timed, elsewhere={} if peer is None else {".peer.": peer}, silence_s_max=_SILENCE_S_MAX)
