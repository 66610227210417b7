"""The corpus and the rows made of it: the same every time, held-out files kept apart, facts answered where the row says."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.demo_training import corpus as corpora
from engine.demo_training.needles import definition_of, fact, weave
from engine.demo_training.rows import Mix, Rows

MODEL = Path(corpora.__file__).resolve().parent.parent / "demo_model"
FUNCTION = 'def area(a, b):\n    """Return the area."""\n    return a * b\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library: 120 distinct files, a duplicate, an unreadable one, an encoding table, a file that does not parse."""
    root = tmp_path / "library"
    (root / "encodings").mkdir(parents=True)
    for number in range(120):
        (root / f"module_{number:03}.py").write_text(f"# file number {number}\n" + FUNCTION * 4)
    (root / "zz_copy.py").write_text((root / "module_000.py").read_text())
    (root / "broken.py").write_bytes(b"x = '\xff\xfe'\n" * 30)
    (root / "encodings" / "table.py").write_text("decoding_table = '" + "a" * 200 + "'\n")
    (root / "unparsable.py").write_text("def (:\n" * 20)
    return root


def test_build_is_deterministic_and_survives_packing(library: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Two builds of one library have one digest, and a packed corpus comes back with it."""
    first, second = (corpora.build(tokenizer, library, library / "none") for _ in range(2))
    assert first.digest == second.digest
    corpora.save(first, tmp_path / "packed.npz")
    assert corpora.load(tmp_path / "packed.npz").digest == first.digest
    (library / "module_001.py").write_text("# changed\n" + FUNCTION * 4)
    assert corpora.build(tokenizer, library, library / "none").digest != first.digest


def test_a_changed_stream_is_refused(library: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A packed file whose tokens are not those that were hashed raises ValueError."""
    corpora.save(corpora.build(tokenizer, library, library / "none"), tmp_path / "packed.npz")
    with np.load(tmp_path / "packed.npz") as packed:
        parts = dict(packed)
    parts["train"][5] ^= 1
    np.savez_compressed(tmp_path / "packed.npz", **parts)
    with pytest.raises(ValueError, match="hash"):
        corpora.load(tmp_path / "packed.npz")


def test_held_out_files_are_in_no_other_stream(library: Path, tokenizer: Tokenizer) -> None:
    """Some files are held out, none of them is in the training stream, and the split follows the path alone."""
    built = corpora.build(tokenizer, library, library / "none")
    train, held = (tokenizer.decode(stream.tolist()) for stream in (built.train, built.held_out))
    names = [path for path, _ in corpora.library_files(library) if path.startswith("module")]
    kept_apart = [path for path in names if corpora.held_out(path)]
    assert kept_apart
    for path in names:
        mark = f"# file number {int(path[7:10])}\n"
        assert (mark in held) == (path in kept_apart)
        assert (mark in train) == (path not in kept_apart)


def test_unclean_files_are_left_out(library: Path) -> None:
    """Undecodable files, encoding tables and second copies are not taken."""
    paths = [path for path, _ in corpora.library_files(library)]
    assert "broken.py" not in paths
    assert "zz_copy.py" not in paths
    assert not any(path.startswith("encodings") for path in paths)
    assert len(paths) == 121


def test_dialogues_hold_the_function_and_skip_what_does_not_parse() -> None:
    """A documented function becomes one dialogue with its source; a file that does not parse gives none."""
    (dialogue,) = corpora.dialogues_of("import os\n\n" + FUNCTION)
    assert "Return the area." in dialogue
    assert FUNCTION.strip() in dialogue
    assert list(corpora.dialogues_of("def (:\n")) == []


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer, library: Path) -> None:
    """The bytes of a text's tokens are the text's UTF-8 bytes, also for letters outside ASCII, and special tokens count nothing."""
    built = corpora.build(tokenizer, library, library / "none")
    text = "naïve = 'Grüße, 世界'\n"
    assert built.token_bytes[tokenizer.encode(text).ids].sum() == len(text.encode())
    assert built.token_bytes[tokenizer.encode(corpora.END).ids].sum() == 0


@pytest.mark.parametrize("facts", [1, 5])
def test_woven_answers_are_where_the_row_says(tokenizer: Tokenizer, facts: int) -> None:
    """Each asked range holds a value that the row defined earlier, and the row has exactly its length."""
    encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
    text = np.asarray(encode("x = 1\ny = [2, 3]\n" * 200), np.uint16)
    line_end = np.asarray([(tokenizer.id_to_token(token) or "").endswith("Ċ") for token in range(tokenizer.get_vocab_size())])
    for seed in range(20):
        row = weave(
            text, line_end, np.random.default_rng(seed), encode, length=500, facts=facts, defined_in=(0.0, 0.9), asked_in=(0.0, 1.0)
        )  # fmt: skip
        assert len(row.tokens) == 500
        assert len(row.asked) == facts
        for first, end in row.asked:
            answer, before = tokenizer.decode(row.tokens[first:end].tolist()), tokenizer.decode(row.tokens[:first].tolist())
            key = before[before.rindex("KEY_") :][:8]
            assert f"{key} = '{answer.strip(chr(39))}'" in before


def test_keys_and_values_keep_their_wording() -> None:
    """A fact is four hexadecimal digits and a value of v and three, on one line."""
    line = definition_of(fact(np.random.default_rng(0)))
    assert len(line) == len("KEY_xxxx = 'vxxx'\n")
    assert line.startswith("KEY_")
    assert line.endswith("'\n")


def test_batches_depend_on_the_step_alone(tokenizer: Tokenizer, library: Path) -> None:
    """Batch 3 is the same whether asked for first or reached from a running start; another seed gives another one."""
    built = corpora.build(tokenizer, library, library / "none")
    mix = Mix(3, 160, dialogues=0.3, needles=0.4, stretched=0.5, facts=(1, 2), sampled=6)
    rows = Rows(built, tokenizer, mix, seed=7, phase="dense", positions_max=4096)
    ahead = rows.ahead(0)
    running = [next(ahead) for _ in range(4)]
    ahead.close()
    direct = rows.batch(3)
    for name in ("tokens", "positions", "sampled", "weight"):
        assert getattr(direct, name).equal(getattr(running[3], name))
    other = Rows(built, tokenizer, mix, seed=8, phase="dense", positions_max=4096).batch(3)
    assert not other.tokens.equal(direct.tokens)


def test_positions_rise_and_stay_in_range(tokenizer: Tokenizer, library: Path) -> None:
    """Stretched positions start at 0, rise by at least 1, and end below the model's limit; answers outweigh other tokens."""
    built = corpora.build(tokenizer, library, library / "none")
    mix = Mix(4, 160, needles=1.0, stretched=1.0, facts=(1, 2), sampled=6)
    rows = Rows(built, tokenizer, mix, seed=1, phase="far", positions_max=2048)
    far = 0
    for step in range(10):
        batch = rows.batch(step)
        gaps = batch.positions.diff(dim=1)
        assert int(batch.positions[:, 0].max()) == 0
        assert int(gaps.min()) == 1
        assert int(batch.positions.max()) < 2048
        assert batch.tokens.shape == (4, 164)
        assert batch.positions.shape == (4, 162)
        assert int(batch.sampled.max()) < 160
        assert float(batch.weight.max()) == mix.answer_weight
        far = max(far, int(gaps.max()))
    assert far > 50
