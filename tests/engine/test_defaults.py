"""generation_config.json: what it gives, and that nonsense in it is one line that names the field."""

from pathlib import Path

import pytest

from engine.defaults import default_eos, default_sampling
from engine.errors import BadModel
from engine.sampling import Sampling


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"top_k": 1e400}', "top_k"), ('{"top_k": -Infinity}', "top_k"), ('{"top_k": NaN}', "top_k"), ('{"top_k": 1.5}', "top_k"),
        ('{"top_k": 1' + "0" * 400 + "}", "top_k"), ('{"top_k": "40"}', "top_k"), ('{"top_k": [1]}', "top_k"),
        ('{"temperature": NaN}', "temperature"), ('{"temperature": 1e999}', "temperature"), ('{"temperature": -1}', "temperature"),
        ('{"temperature": 1' + "0" * 400 + "}", "temperature"), ('{"temperature": true}', "temperature"),
        ('{"top_p": {"a": 1}}', "top_p"), ('{"top_p": 0}', "top_p"), ('{"min_p": 7}', "min_p"),
        ('{"repetition_penalty": 1e-9}', "repetition_penalty"), ('{"top_p": "' + "x" * 9_000 + '"}', "top_p"),
        ("[" * 200_000, "cannot be read"), ('{"top_k": 1' + "0" * 5_000 + "}", "cannot be read"), ("\xff", "cannot be read"),
    ],
    ids=map(str, range(20)),
)  # fmt: skip
def test_nonsense_is_one_line_that_names_the_field(content: str, named: str, tmp_path: Path) -> None:
    """Whatever a field holds, a bad model is what is raised, shortly."""
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadModel, match=r"generation_config\.json") as caught:
        default_sampling(tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("given", ["-1", "0", "40", "40.0"])
def test_a_top_k_that_means_something_is_taken(given: str, tmp_path: Path) -> None:
    """Below 1 it is off, and a whole number may be written as a float."""
    (tmp_path / "generation_config.json").write_text(f'{{"top_k": {given}}}')
    assert default_sampling(tmp_path) == Sampling(top_k=max(0, int(float(given))))


@pytest.mark.parametrize(
    ("content", "ends"),
    [(None, ()), ("{}", ()), ('{"eos_token_id": null}', ()), ('{"eos_token_id": 0}', (0,)), ('{"eos_token_id": [3, 1]}', (3, 1))],
)  # fmt: skip
def test_ends_of_a_text(content: str | None, ends: tuple[int, ...], tmp_path: Path) -> None:
    """One id or a list of ids; without the file or the field there is none."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert default_eos(tmp_path) == ends


@pytest.mark.parametrize("value", ["-1", "1.5", "true", '"</s>"', "[1, null]", "{}", "NaN"])
def test_ends_that_are_no_ids_are_refused(value: str, tmp_path: Path) -> None:
    """A value that is no token id is a bad model that names the field."""
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(BadModel, match="eos_token_id"):
        default_eos(tmp_path)
