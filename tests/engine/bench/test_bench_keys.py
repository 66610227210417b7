"""`forebay bench keys`: selections compared where there is something to select, answers beside float32 ones, one line for a bad command."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench import keys as measured
from engine.bench.keys import FORMATS, Overlap, own_text
from engine.errors import BadSetting
from tests.engine.bench.arms import FLAGS, line
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

COUNTS = ("--read-tokens", "90", "--windows", "2", "--window-tokens", "40", "--new-tokens", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokenizer has a token a byte below its vocabulary."""
    config = tiny_config(vocab_size=256)
    directory = write_checkpoint(random_tensors(config, 3), config, tmp_path_factory.mktemp("tiny"))
    table = {name: number for number, name in enumerate(_letters())}
    inner = {"type": "BPE", "vocab": table, "merges": []}
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    text = json.dumps({"version": "1.0", "model": inner, "pre_tokenizer": level, "decoder": level, "added_tokens": []})
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    return directory


def _letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def test_formats_are_compared_with_float32(model: Path, tmp_path: Path, capsys: Any) -> None:
    """Rows past top-k are compared in every group, bf16 keeps more of a selection than e4m3, and the table and JSON say so."""
    target = tmp_path / "out.json"
    assert line("keys", str(model), *FLAGS, *COUNTS, "--json", str(target)) == 0
    written = json.loads(target.read_text())
    top_k, groups = int(tiny_config()["index_topk"]), tiny_config()["indexer_types"].count("full")
    rows = sum(end > top_k and end % 16 == 0 for end in range(1, 91))
    for name in FORMATS:
        found = written["formats"][name]
        assert [one["rows"] for one in found["overlap"]] == [rows] * groups
        assert all(0 < one["least"] <= one["mean"] <= 1 for one in found["overlap"])
        assert len(found["answers"]) == len(found["led"]) == 2
        for answer, led in zip(found["answers"], found["led"], strict=True):
            assert led >= answer["leading"] / 3  # led or not, it said the same up to there
            assert (led == 1.0) == (answer["leading"] == 3)
    bf16, e4m3 = (sum(one["mean"] for one in written["formats"][name]["overlap"]) for name in FORMATS)
    assert e4m3 < bf16
    assert "rows compared" in capsys.readouterr().out


def test_keys_that_say_nothing_overlap_little(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keys' order turned round before they are stored again, the comparison sees it."""
    real = measured.unpack_keys
    monkeypatch.setattr(measured, "unpack_keys", lambda keys, layout: real(keys, layout).flip(0))
    target = tmp_path / "out.json"
    assert line("keys", str(model), *FLAGS, *COUNTS, "--json", str(target)) == 0
    assert all(one["mean"] < 0.9 for one in json.loads(target.read_text())["formats"]["bf16"]["overlap"])


def test_sums_of_overlaps() -> None:
    """Mean, least and equal rows of 1, 3/4 and 1/2; nothing of no rows."""
    found = Overlap()
    assert found.mean == 0.0
    for share in (1.0, 0.75, 0.5):
        found.add(share)
    assert (found.rows, found.mean, found.least, found.equal) == (3, 0.75, 0.5, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--windows", "0"), "--windows must be at least 1"),
        (("--new-tokens", "some"), "--new-tokens must be an integer"),
        (("--text", "nothing here"), "--text: cannot read nothing here"),
        (("--window-tokens", "99000000"), "fewer than --window-tokens"),
    ],
)
def test_a_bad_line_is_one_line(model: Path, words: tuple[str, ...], said: str) -> None:
    """What to change, before anything was measured."""
    with pytest.raises(BadSetting, match=said):
        line("keys", str(model), *FLAGS, *words)


def test_the_text_is_this_programs_own() -> None:
    """Source of memory/, long enough to read."""
    assert "class KeyPages" in own_text()
    assert len(own_text()) > 50_000
