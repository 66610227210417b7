"""Every tensor of a model by its path, for comparing models."""

import dataclasses

from torch import Tensor

__all__ = ["weights_of"]


def weights_of(part: object, path: str = "") -> dict[str, Tensor]:
    """Every tensor of nested frozen weights by its path."""
    if isinstance(part, Tensor):
        return {path: part}
    if isinstance(part, list):
        return {name: each for i, inner in enumerate(part) for name, each in weights_of(inner, f"{path}.{i}").items()}
    if dataclasses.is_dataclass(part):
        return {
            name: each
            for one in dataclasses.fields(part)
            for name, each in weights_of(getattr(part, one.name), f"{path}.{one.name}").items()
        }
    return {}
