"""Row and key formats: from a setting's name and the model's dims to a layout of bytes.

Arithmetic only. Knows no tensors and no sessions; the layouts themselves are `kernels/layout.py`.

Invariants:
1. A format is chosen once, when a stage opens; every row of a stage has the same number of bytes.
2. GLM-5.x (latent 512, RoPE 64) in q8g64 is 656 bytes: 512 latent, 16 scales, 128 RoPE key. Its index key (128) in e4m3 is 132.
"""

from typing import Literal, TypeAlias

from kernels.layout import KeyLayout, RowLayout

__all__ = ["KEY_FORMATS", "ROW_FORMATS", "KeyFormat", "RowFormat", "key_format", "key_layout", "row_layout"]

RowFormat: TypeAlias = Literal["q8g64", "bf16", "f32"]
KeyFormat: TypeAlias = Literal["bf16", "f32", "e4m3"]

ROW_FORMATS: tuple[RowFormat, ...] = ("q8g64", "bf16", "f32")
KEY_FORMATS: tuple[KeyFormat, ...] = ("bf16", "f32", "e4m3")


def row_layout(name: RowFormat, latent: int, rope: int) -> RowLayout:
    """Layout of a packed row.

    Args: name: of the format. latent, rope: values in the latent and in the RoPE key (`kv_lora_rank`, `qk_rope_head_dim`).
    Returns: offsets and bytes; `row_bytes` is a multiple of 16.
    """
    assert name in ROW_FORMATS, f"no row format {name!r}"
    assert latent > 0, f"a row has a latent, not {latent} values"
    assert rope > 0, f"a row has a RoPE key, not {rope} values"
    return RowLayout(name, latent, rope)


def key_layout(name: KeyFormat, width: int) -> KeyLayout:
    """Layout of index keys of `width` values (`index_head_dim`)."""
    assert name in KEY_FORMATS, f"no key format {name!r}"
    assert width > 0, f"a key has values, not {width}"
    return KeyLayout(name, width)


def key_format(setting: Literal["auto", "bf16", "f32", "e4m3"], row: RowFormat) -> KeyFormat:
    """Resolve the `index_key_format` setting: `auto` is f32 beside f32 rows, so that tests can be exact, else bf16."""
    if setting != "auto":
        return setting
    return "f32" if row == "f32" else "bf16"
