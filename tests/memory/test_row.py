"""Row formats to the byte."""

import pytest

from memory.row import KEY_FORMATS, ROW_FORMATS, key_format, key_layout, row_layout

MIB, GIB = 2**20, 2**30


def test_glm_5_row_is_656_bytes() -> None:
    """512 int8 values, 8 float16 scales, 64 bfloat16 values, in this order, with no padding."""
    row = row_layout("q8g64", 512, 64)
    assert (row.latent_bytes, row.scale_groups, row.scales_offset, row.rope_offset, row.row_bytes) == (512, 8, 512, 528, 656)


@pytest.mark.parametrize(
    ("name", "latent", "rope", "expected"),
    [
        ("bf16", 512, 64, 1152),
        ("f32", 512, 64, 2304),
        ("q8g64", 64, 8, 64 + 2 + 16 + 14),  # 82, padded to 96
        ("q8g64", 65, 8, 65 + 1 + 4 + 16 + 10),  # an odd latent takes a byte to align its scales; a ragged second group
        ("q8g64", 63, 1, 63 + 1 + 2 + 2 + 12),
        ("q8g64", 24, 6, 24 + 2 + 12 + 10),
        ("bf16", 24, 6, 60 + 4),
        ("f32", 33, 5, 152 + 8),
        ("f32", 2, 2, 16),  # exactly 16: nothing to pad
    ],
)
def test_bytes_of_other_shapes(name: str, latent: int, rope: int, expected: int) -> None:
    """Fields in order, scales aligned to 2, the whole rounded up to 16."""
    assert row_layout(name, latent, rope).row_bytes == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("latent", [1, 63, 64, 65, 128, 191])
@pytest.mark.parametrize("rope", [1, 2, 63, 64])
def test_fields_do_not_overlap_and_are_aligned(name: str, latent: int, rope: int) -> None:
    """Every format: latent, scales and RoPE key follow one another at their dtype's alignment inside a multiple of 16 bytes."""
    row = row_layout(name, latent, rope)  # type: ignore[arg-type]
    width = 4 if name == "f32" else 2
    assert row.latent_bytes <= row.scales_offset <= row.rope_offset <= row.row_bytes - width * rope
    assert row.scales_offset % 2 == 0
    assert row.rope_offset % width == 0
    assert row.row_bytes % 16 == 0
    assert row.row_bytes - row.rope_offset - width * rope < 16


def test_sizes_of_long_histories() -> None:
    """The design's arithmetic for GLM-5.x comes out."""
    row = row_layout("q8g64", 512, 64).row_bytes
    assert round(50_000 * row / MIB, 3) == 31.281
    assert round(50_000 * row * 78 * 2 / GIB, 3) == 4.765
    assert 2048 * row / MIB == 1.28125
    assert 32_768 * row / MIB == 20.5
    assert round(2**20 * row * 78 * 2 / GIB, 2) == 99.94
    assert round(15 * 32_768 * row * 78 * 2 / GIB, 2) == 46.85


@pytest.mark.parametrize(("name", "width", "expected"), [("bf16", 128, 256), ("f32", 128, 512), ("bf16", 5, 16), ("f32", 33, 144)])
def test_key_bytes(name: str, width: int, expected: int) -> None:
    """A key is its values, rounded up to 16 bytes; a page holds 1,024."""
    assert key_layout(name, width).key_bytes == expected  # type: ignore[arg-type]
    assert key_layout(name, width).page_bytes == 1024 * expected  # type: ignore[arg-type]


def test_auto_key_format_follows_the_rows() -> None:
    """`auto` is f32 beside f32 rows and bf16 beside the others; an explicit format stays."""
    assert [key_format("auto", row) for row in ROW_FORMATS] == ["bf16", "bf16", "f32"]
    assert [key_format(name, "q8g64") for name in KEY_FORMATS] == list(KEY_FORMATS)


def test_an_unknown_format_is_our_bug() -> None:
    """Names outside the list never make a layout."""
    with pytest.raises(AssertionError, match="no row format 'q4'"):
        row_layout("q4", 512, 64)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="no key format 'e5m2'"):
        key_layout("e5m2", 128)  # type: ignore[arg-type]
