"""How a checkpoint says that its weights are quantised: the `quantization_config` of config.json.

Holds `Quantisation` and `Scheme`, and their reading. Knows no tensors.

1. Read: block-FP8, compressed-tensors in the pack-quantized format, AWQ in its gemm order. What else there is is refused by its name.
2. A module's scheme is that of a target that names it, else of a pattern that matches it, else of the class `Linear`; ignored modules
   have none. Which weights are stored packed is for the tensors to say: a scheme says what a packed one means.
Source: model.md, sections 4.2 and 4.3.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from engine.errors import BadModel, shown
from kernels.linear.group_int import CODE_BITS

__all__ = ["NOT_QUANTISED", "Method", "Quantisation", "Scheme", "described", "read_quantisation"]

Method: TypeAlias = Literal["none", "fp8", "compressed-tensors", "awq"]
GROUPS = (32, 64, 128)
_FIELD = "config.json: quantization_config"
_READ = "fp8 in blocks, compressed-tensors pack-quantized with 4 or 8 bits, and awq gemm with 4 bits are"
_EXCEPT = "modules_to_not_convert"
_NOT_LINEAR = ("model.embed_tokens", ".mlp.gate")  # weights [outputs, width] of modules of other classes


@dataclass(frozen=True, slots=True)
class Scheme:
    """What packed weights of some modules are: `bits` a code, a scale for `group` values of the width (0: one an output)."""

    bits: int
    group: int
    symmetric: bool  # else packed zeros are stored beside the scales
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights may be stored. `block`: rows and columns that share a scale in block-FP8. `ignored`: modules, or patterns, left out;
    block-FP8's are said by the config, and what is stored is believed."""

    method: Method = "none"
    block: tuple[int, int] = (128, 128)
    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module (a weight's name without its last part), or None."""
        if not self.schemes:
            return None
        linear = not module.endswith(_NOT_LINEAR) and "norm" not in module.rsplit(".", 1)[-1]
        if any(_matches(each, module, linear) for each in self.ignored):
            return None
        for named in (_is_named, _is_pattern, _is_class):
            for scheme in self.schemes:
                if any(named(target, module, linear) for target in scheme.targets):
                    return scheme
        return None


NOT_QUANTISED = Quantisation()


def described(schemes: Iterable[Scheme], ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a compressed-tensors checkpoint with these schemes."""
    groups = {
        f"group_{number}": {
            "targets": list(scheme.targets),
            "weights": {
                "num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "strategy": "group" if scheme.group else "channel",
                "group_size": scheme.group or None, "dynamic": False, "actorder": None, "observer": "minmax",
            },
            "input_activations": None,
            "output_activations": None,
        }
        for number, scheme in enumerate(schemes)
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": list(ignored), "kv_cache_scheme": None,
    }  # fmt: skip


def _is_named(target: str, module: str, linear: bool) -> bool:
    return target == module


def _is_pattern(target: str, module: str, linear: bool) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_class(target: str, module: str, linear: bool) -> bool:
    return target == "Linear" and linear


def _matches(target: str, module: str, linear: bool) -> bool:
    return any(named(target, module, linear) for named in (_is_named, _is_pattern, _is_class))


def read_quantisation(config: Mapping[str, Any]) -> Quantisation:
    """Of a parsed config.json. Raises BadModel naming the field."""
    found = config.get("quantization_config")
    if found is None:
        found = config.get("compression_config")  # its name in older files
    if found is None:
        return NOT_QUANTISED
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if isinstance(found, Mapping):
        if method == "fp8":
            return Quantisation("fp8", _block(found), ignored=_names(_EXCEPT, found.get(_EXCEPT) or ()))
        if method == "compressed-tensors" or (method is None and "config_groups" in found):
            return _compressed(found)
        if method == "awq":
            return _awq(found)
    raise BadModel(f"{_FIELD}.quant_method {shown(method)} is not supported; {_READ}")


def _refuse(field: str, value: object, only: str) -> NoReturn:
    raise BadModel(f"{_FIELD}.{field} {shown(value)} is not supported, only {only}")


def _block(found: Mapping[str, Any]) -> tuple[int, int]:
    if found.get("fmt", "e4m3") != "e4m3":
        _refuse("fmt", found["fmt"], "'e4m3'")
    if found.get("activation_scheme") not in (None, "dynamic"):
        _refuse("activation_scheme", found["activation_scheme"], "'dynamic'")
    block = found.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise BadModel(f"{_FIELD}.weight_block_size must be two positive integers, not {shown(block)}")
    return block[0], block[1]


def _compressed(found: Mapping[str, Any]) -> Quantisation:
    form = found.get("format")
    if form not in ("pack-quantized", "mixed-precision"):
        _refuse("format", form, "'pack-quantized'")
    for field in ("transform_config", "sparsity_config"):
        if found.get(field):
            _refuse(field, found[field], "none")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadModel(f"{_FIELD}.config_groups must be an object with at least one group")
    schemes = tuple(_scheme(f"config_groups.{name}", group, form) for name, group in groups.items())
    return Quantisation("compressed-tensors", schemes=schemes, ignored=_names("ignore", found.get("ignore") or ()))


def _scheme(field: str, group: object, form: str) -> Scheme:
    """One config group; the field's name is for messages."""
    if not isinstance(group, Mapping):
        raise BadModel(f"{_FIELD}.{field} must be an object, not {shown(group)}")
    for name in ("input_activations", "output_activations"):
        if group.get(name) is not None:
            _refuse(f"{field}.{name}", group[name], "weights are quantised here, so null")
    own = group.get("format", form)
    if own not in (None, "pack-quantized"):
        _refuse(f"{field}.format", own, "'pack-quantized'")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise BadModel(f"{_FIELD}.{field}.weights must be an object, not {shown(weights)}")
    for name, allowed in (("type", ("int", None)), ("actorder", (None, False, "weight", "static")), ("dynamic", (None, False))):
        if weights.get(name) not in allowed:
            _refuse(f"{field}.weights.{name}", weights[name], repr(allowed[0]))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else None)
    if strategy not in ("group", "channel"):
        _refuse(f"{field}.weights.strategy", strategy, "'group' and 'channel'")
    size = 0 if strategy == "channel" else weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise BadModel(f"{_FIELD}.{field}.weights.symmetric must be true or false, not {shown(symmetric)}")
    bits = weights.get("num_bits")
    return _checked(
        f"{field}.weights.num_bits", bits, f"{field}.weights.group_size", size, symmetric, _names(f"{field}.targets", group.get("targets"))
    )


def _awq(found: Mapping[str, Any]) -> Quantisation:
    version = found.get("version", "gemm")
    if str(version).lower() != "gemm":
        _refuse("version", version, "'gemm'")
    if (bits := found.get("bits")) != 4:
        _refuse("bits", bits, "4")
    zeros = found.get("zero_point", True)
    if not isinstance(zeros, bool):
        raise BadModel(f"{_FIELD}.zero_point must be true or false, not {shown(zeros)}")
    return Quantisation("awq", schemes=(_checked("bits", bits, "group_size", found.get("group_size"), not zeros, ("Linear",)),))


def _checked(bits_field: str, bits: object, group_field: str, group: object, symmetric: bool, targets: tuple[str, ...]) -> Scheme:
    if type(bits) is not int or bits not in CODE_BITS:
        _refuse(bits_field, bits, " and ".join(map(str, CODE_BITS)))
    if type(group) is not int or group not in (0, *GROUPS):
        _refuse(group_field, group, ", ".join(map(str, GROUPS)))
    return Scheme(bits, group, symmetric, targets)


def _names(field: str, listed: object) -> tuple[str, ...]:
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise BadModel(f"{_FIELD}.{field} must be a list of names, not {shown(listed)}")
    for each in listed:
        if each.startswith("re:"):
            try:
                re.compile(each[3:])
            except re.error as error:
                raise BadModel(f"{_FIELD}.{field}: {shown(each)} is no regular expression: {error}") from error
    return tuple(listed)
