"""What the processes of a cluster agree on: addresses, layers of stages, fingerprints, and the key."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.config import ClusterConfig, EngineConfig
from engine.errors import BadSetting
from engine.model.config import ModelConfig
from engine.model.named import NAMED
from engine.node.address import Address, parse_address, parse_addresses
from engine.node.agreement import DOCTOR_TERMS, fingerprint_of, stage_terms
from engine.node.keys import key_of, limits_of

DEMO = ModelConfig.read(Path(__file__).parents[3] / "engine" / "demo_model")
GLM = ModelConfig.read(NAMED["glm-5.3"])
LIMITS = limits_of(ClusterConfig())


@pytest.mark.parametrize(
    ("text", "address"),
    [("a:1", Address("a", 1)), (" 10.0.0.2:7000 ", Address("10.0.0.2", 7000)), ("[fd00::2]:7", Address("fd00::2", 7))],
)
def test_an_address_is_read_and_written_back(text: str, address: Address) -> None:
    """As people write it."""
    assert parse_address(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize("text", ["", "a", "a:", ":7", "a:x", "a:70000", "fd00::2:7", "[fd00::2]", "a:-1", "a:1:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """With a line that says how one looks."""
    with pytest.raises(ValueError, match=r"host:port, like 10\.0\.0\.2:7000"):
        parse_address(text)


LIMITS = limits_of(ClusterConfig())


def test_several_addresses_are_in_order_and_differ() -> None:
    """Their order is that of the stages."""
    assert parse_addresses("b:1, a:1") == (Address("b", 1), Address("a", 1))


def test_terms_tell_the_processes_apart() -> None:
    """All have one map and different numbers, the head the last; the doctor's are its own."""
    stages = (range(3), range(3, 8))
    fingerprint = fingerprint_of(DEMO, EngineConfig(), LIMITS)
    every = [stage_terms(fingerprint, stages, stage) for stage in range(2)]
    assert [each.stage for each in every] == [0, 1]
    assert {each.layer_map for each in every} == {((0, 3), (3, 5))}
    assert DOCTOR_TERMS.fingerprint != fingerprint


def test_the_fingerprint_has_what_decides_about_rows_and_steps() -> None:
    """Formats, sizes of steps, the time-out and the architecture change it; what concerns one machine does not; it fits into a
    handshake."""
    plain = fingerprint_of(DEMO, EngineConfig(), LIMITS)
    assert plain.endswith(f" forebay={version('forebay')}")
    assert len(fingerprint_of(GLM, EngineConfig(index_key_format="e4m3", draft_depth=None), LIMITS)) <= 256
    different = [
        EngineConfig(row_format="f32"), EngineConfig(index_key_format="e4m3"), EngineConfig(dtype="bf16"),
        EngineConfig(latent_norm_eps=1e-5), EngineConfig(append_chunk_rows=64), EngineConfig(context_max=512),
        EngineConfig(placement="resident"), EngineConfig(draft_depth=1),
        EngineConfig(decode_batch_limit=2),
    ]  # fmt: skip
    others = {fingerprint_of(GLM, EngineConfig(), LIMITS), *(fingerprint_of(DEMO, each, LIMITS) for each in different)}
    assert len({plain, *others}) == len(different) + 2
    same = [EngineConfig(host_memory_bytes=1 << 30), EngineConfig(hot_rows=64), EngineConfig(device="cpu"), EngineConfig(tape="t")]
    assert {fingerprint_of(DEMO, each, LIMITS) for each in same} == {plain}
    assert fingerprint_of(DEMO, EngineConfig(), limits_of(ClusterConfig(peer_timeout_s=0.5))) != plain
    assert fingerprint_of(replace(DEMO, top_k=DEMO.top_k // 2), EngineConfig(), LIMITS) != plain


def test_the_key_comes_from_its_file(tmp_path: Path) -> None:
    """No file and a file without a key are one line each."""
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    assert key_of(ClusterConfig(key_file=str(file))) == b"0123456789abcdef"
    file.write_text("short")
    for config, words in ((ClusterConfig(), "--key-file"), (ClusterConfig(key_file=str(file)), "holds 5 bytes")):
        with pytest.raises(BadSetting, match=words):
            key_of(config)


def test_the_time_out_is_that_of_every_channel() -> None:
    """A peer is lost after it; beats are a fifth of it apart, at most a second."""
    assert (limits_of(ClusterConfig()).silence_ms_max, limits_of(ClusterConfig()).beat_ms) == (5000, 1000)
    short = limits_of(ClusterConfig(peer_timeout_s=0.05))
    assert (short.silence_ms_max, short.beat_ms) == (50, 10)
