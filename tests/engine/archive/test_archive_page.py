"""The page about the format: its script, with numpy alone, reads what the engine wrote, and its numbers are the program's."""

import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from engine.archive.manifest import VERSION, Manifest, Segment
from kernels.layout import HIDDEN_ROWS
from kernels.quantize import unpack_rows
from memory.row import KeyFormat, RowFormat, row_layout
from tests.engine.archive.archive_world import Picture, export, identity

PAGE = (Path(__file__).resolve().parents[3] / "docs/archive.md").read_text()
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]


def test_the_script_is_short_and_needs_numpy_alone() -> None:
    """At most 32 lines, importing nothing but numpy and what comes with Python."""
    assert len(SCRIPT.splitlines()) <= 32
    assert set(re.findall(r"^(?:import|from) (.+)$", SCRIPT, re.MULTILINE)) == {"json, pathlib", "numpy as np"}


@pytest.mark.parametrize(("row", "key"), [("q8g64", "bf16"), ("bf16", "e4m3"), ("f32", "f32")])
def test_the_script_reads_what_was_written(tmp_path: Path, row: RowFormat, key: KeyFormat) -> None:
    """In a process of its own, without this program: every byte of rows and keys of every layer, and the latents' values."""
    of = identity(row, key)
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture, segment_blocks=1)
    picture = picture.cut(70).then(Picture.drawn(of, 150, 2))
    export(tmp_path / "a", of, picture, segment_blocks=2)
    code = SCRIPT + (
        "\nimport sys\nfor kind, layers in (('rows', 6), ('keys', 3)):\n"
        "    np.save(kind, np.stack([read('a', kind, layer)[0] for layer in range(layers)]))\n"
        "np.save('latents', latents(*read('a', 'rows', 2)))\n"
        "assert not any(name.startswith(('engine', 'memory', 'torch', 'xxhash', 'msgspec')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert numpy.array_equal(numpy.load(tmp_path / "rows.npy"), picture.rows)
    assert numpy.array_equal(numpy.load(tmp_path / "keys.npy"), picture.keys)
    expected, _ = unpack_rows(torch.from_numpy(picture.rows[2].copy()), row_layout(row, 20, 8))
    found = torch.from_numpy(numpy.load(tmp_path / "latents.npy"))
    assert torch.equal(found.nan_to_num(), expected.float().nan_to_num())


def test_the_page_names_every_field() -> None:
    """Each field of the manifest and of a segment has its line, and there are no others."""
    named = {name for line in PAGE.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    fields = {*Manifest.__struct_fields__, *Segment.__struct_fields__}
    reasons = {"damaged", "truncated", "missing", "foreign", "format", "newer"}
    assert named == fields | reasons | {"reason"}
    assert f'"version":{VERSION}' in PAGE
    assert f"`[{HIDDEN_ROWS}, hidden_width]`" in PAGE
