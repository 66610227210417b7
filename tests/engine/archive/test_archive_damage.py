"""A hundred and more kinds of damage: each is refused with one line that says which, and nothing is held afterwards."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree, rmtree

import msgspec
import pytest
import xxhash

from engine.archive.manifest import decode, encode
from engine.archive.reader import Reader
from engine.engine import Engine
from engine.errors import ArchiveFailed, ArchiveRefused, ForebayError
from engine.search.tiny import TinyModel, prompt
from tests.engine.archive.archive_world import Picture, export, identity, read
from tests.engine.archive.engines import held, say, session_of
from tests.engine.runs import small


def _manifest(path: Path) -> Path:
    return path / "manifest.json"


def _segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.bin"))


def _flip(path: Path, byte: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def _swap(one: Path, other: Path) -> None:
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def _say(path: Path, **changes: object) -> None:
    """Change fields and make the manifest's checksum right again: what a wrong program would write."""
    manifest = decode(_manifest(path).read_bytes(), "here")
    _manifest(path).write_bytes(encode(msgspec.structs.replace(manifest, **changes)))


def _raw(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the body's bytes and make its checksum right again."""
    outer = msgspec.json.decode(_manifest(path).read_bytes(), type=dict[str, msgspec.Raw])
    body = change(bytes(outer["body"]))
    outer |= {"body": msgspec.Raw(body), "checksum": msgspec.Raw(f'"{xxhash.xxh3_128_hexdigest(body)}"'.encode())}
    _manifest(path).write_bytes(msgspec.json.encode(outer))


def _segment(path: Path, nth: int, **changes: object) -> None:
    found = list(decode(_manifest(path).read_bytes(), "here").segments)
    found[nth] = msgspec.structs.replace(found[nth], **changes)
    _say(path, segments=tuple(found))


def damages(path: Path, seed: int) -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    """What happens to a copy of an archive: its name, the reasons it may be refused for, and how it is done."""
    draw = random.Random(seed)
    manifest = decode(_manifest(path).read_bytes(), "here")
    size = _manifest(path).stat().st_size
    places = [draw.randrange(size) for _ in range(30)] + [*range(0, 60, 7), size - 1]
    for byte in places:
        bit = draw.randrange(8)
        yield f"bit {bit} of byte {byte} of the manifest", "damaged newer", lambda at, b=byte, i=bit: _flip(_manifest(at), b, i)  # type: ignore[misc]
    for number, segment in enumerate(_segments(path)):
        length = segment.stat().st_size
        said = next(one for one in manifest.segments if one.name == segment.name)
        read_bytes = min(said.rows, -(-said.counted // 64) * 64) * length // said.rows  # pieces that nothing counts are not read
        for byte in (0, read_bytes - 1, *(draw.randrange(read_bytes) for _ in range(4))):
            yield f"byte {byte} of {segment.name}", "damaged", lambda at, n=number, b=byte: _flip(_segments(at)[n], b, 3)  # type: ignore[misc]
        for length_left in (0, 1, length // 2, length - 1):
            yield f"{segment.name} cut", "truncated", lambda at, n=number, left=length_left: os.truncate(_segments(at)[n], left)  # type: ignore[misc]
        yield f"{segment.name} longer", "truncated", lambda at, n=number: os.truncate(_segments(at)[n], _segments(at)[n].stat().st_size + 1)  # type: ignore[misc]
        yield f"{segment.name} gone", "missing", lambda at, n=number: _segments(at)[n].unlink()  # type: ignore[misc]
        yield f"{segment.name} a link", "damaged", lambda at, n=number: _link(_segments(at)[n])  # type: ignore[misc]
        yield f"{segment.name} a directory", "damaged", lambda at, n=number: _directory(_segments(at)[n])  # type: ignore[misc]
    for left in (0, 1, 17, size // 2, size - 1):
        yield f"manifest cut to {left}", "damaged", lambda at, n=left: os.truncate(_manifest(at), n)  # type: ignore[misc]
    yield "no manifest", "missing", lambda at: _manifest(at).unlink()
    yield "a newer version", "newer", lambda at: _replace(_manifest(at), b'"version":1', b'"version":2')
    yield "an older version", "damaged", lambda at: _replace(_manifest(at), b'"version":1', b'"version":0')
    yield "another format", "damaged", lambda at: _replace(_manifest(at), b"forebay archive", b"frobnay archive")
    yield "no JSON", "damaged", lambda at: _manifest(at).write_bytes(b"\xff\xfe{")  # type: ignore[func-returns-value]
    yield "deep JSON", "damaged", lambda at: _manifest(at).write_bytes(b"[" * 100_000)  # type: ignore[func-returns-value]
    yield "another architecture", "foreign", lambda at: _say(at, architecture="0" * 32)
    yield "another tokenizer", "foreign", lambda at: _say(at, tokenizer="0" * 64)
    yield "other weights", "foreign", lambda at: _say(at, weights=tuple("0" * 32 for _ in manifest.weights))
    yield "a strange token", "foreign", lambda at: _say(at, tokens=(*manifest.tokens[:-1], 1_000_000))
    yield "fewer tokens than rows", "damaged", lambda at: _say(at, tokens=manifest.tokens[:5])
    yield "more rows", "damaged", lambda at: _say(at, rows=manifest.rows + 1)
    yield "fewer rows", "damaged", lambda at: _say(at, rows=manifest.rows - 1)
    yield "short hidden states", "damaged", lambda at: _say(at, hidden=manifest.hidden[:-4])
    yield "no hidden states", "damaged", lambda at: _say(at, hidden=b"")
    yield "hidden states of the future", "damaged", lambda at: _say(at, hidden_from=manifest.rows + 1)
    yield "another width", "damaged", lambda at: _say(at, hidden_width=manifest.hidden_width + 1)
    yield "no MTP rows", "damaged", lambda at: _say(at, mtp_rows=False)
    yield "fewer layers", "damaged", lambda at: _say(at, layers=manifest.layers - 1)
    yield "weights of fewer layers", "damaged", lambda at: _say(at, weights=manifest.weights[1:])
    yield "indexer layers out of order", "damaged", lambda at: _say(at, indexer_layers=(1, 0))
    other_rows = msgspec.structs.replace(manifest.rows_as, latent=manifest.rows_as.latent + 1)
    yield "other rows", "format", lambda at: _say(at, rows_as=other_rows)
    other_keys = msgspec.structs.replace(manifest.keys_as, encoding="bf16")
    yield "other keys", "format", lambda at: _say(at, keys_as=other_keys)
    yield "a segment twice", "damaged", lambda at: _say(at, segments=(*manifest.segments, manifest.segments[0]))
    yield "a segment less", "damaged", lambda at: _say(at, segments=manifest.segments[1:])
    yield "a segment elsewhere", "damaged", lambda at: _segment(at, 0, first_row=64)
    yield "a segment inside a block", "damaged", lambda at: _segment(at, 0, first_row=1)
    yield "a segment of other layers", "damaged", lambda at: _segment(at, 0, first_layer=1)
    yield "a segment of too many rows", "damaged", lambda at: _segment(at, 0, rows=manifest.segments[0].rows + 64)
    yield "a segment counted short", "damaged", lambda at: _segment(at, 0, counted=1)
    yield "a piece of another name", "damaged", lambda at: _segment(at, 0, pieces=("0" * 32, *manifest.segments[0].pieces[1:]))
    yield "a segment of another name", "damaged", lambda at: _segment(at, 0, checksum="0" * 32)
    yield "rows called keys", "damaged", lambda at: _segment(at, 0, kind="keys")
    yield "a path for a name", "damaged", lambda at: _raw(at, lambda body: body.replace(b'"checksum":"', b'"checksum":"../', 1))
    yield "a path for an id", "damaged", lambda at: _raw(at, lambda body: body.replace(b'"session":"', b'"session":"../../', 1))
    yield "an id with a line", "damaged", lambda at: _raw(at, lambda body: body.replace(b'","revision"', b'\\n","revision"', 1))
    yield "a field too many", "damaged", lambda at: _raw(at, lambda body: body[:-1] + b',"more":1}')
    yield "a field twice of another type", "damaged", lambda at: _raw(at, lambda body: body.replace(b'"revision":', b'"revision":-', 1))
    yield (
        "a count of 2^70",
        "damaged",
        lambda at: _raw(at, lambda body: body.replace(b'"revision":', b'"revision":1180591620717411303424', 1)),
    )
    same = [(one, other) for one in _segments(path) for other in _segments(path) if one < other]
    for one, other in same:
        alike = one.stat().st_size == other.stat().st_size
        reasons = "damaged" if alike else "truncated"
        yield f"{one.name} and {other.name} swapped", reasons, lambda at, a=one.name, b=other.name: _swap(at / a, at / b)  # type: ignore[misc]


def _replace(path: Path, old: bytes, new: bytes) -> None:
    written = path.read_bytes()
    assert old in written
    path.write_bytes(written.replace(old, new, 1))


def _link(path: Path) -> None:
    """The same bytes, but elsewhere."""
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere").name)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


async def test_a_hundred_damages_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    """Every one is one line with its reason; arena, pool, ledger and sessions are as before; then a session says what it always would."""
    tiny = TinyModel()
    async with Engine.open("tiny", small(hot_rows=24, host_memory_bytes=8 << 20), weights=tiny.model) as engine:
        expected = await say(engine, None, prompt(90, 4), 12)
        session = await session_of(engine, 130)
        await engine.export_session(session, tmp_path / "sound")
        await say(engine, session, prompt(70, 2), 4)
        await engine.export_session(session, tmp_path / "sound")
        await engine.close_session(session)
        before, done = held(engine), 0
        for name, reasons, damage in damages(tmp_path / "sound", 11):
            copytree(tmp_path / "sound", tmp_path / "copy")
            damage(tmp_path / "copy")
            with pytest.raises(ArchiveRefused) as caught:
                await engine.import_session(tmp_path / "copy")
            assert caught.value.reason in reasons.split(), f"{name}: {caught.value}"
            assert "\n" not in str(caught.value), name
            assert len(str(caught.value)) < 500, name
            assert held(engine) == before, name
            rmtree(tmp_path / "copy")
            done += 1
        assert done >= 100
        assert await say(engine, None, prompt(90, 4), 12) == expected
        again = await engine.import_session(tmp_path / "sound")
        assert again == session


def test_an_export_over_damage_makes_it_whole(tmp_path: Path) -> None:
    """An export into a damaged archive of its session replaces it; over a newer one, or what is no archive, it is refused."""
    of = identity()
    picture = Picture.drawn(of, 200, 1)
    export(tmp_path / "sound", of, picture)
    replaced = 0
    for name, _, damage in damages(tmp_path / "sound", 5):
        copytree(tmp_path / "sound", tmp_path / "copy")
        damage(tmp_path / "copy")
        written = _manifest(tmp_path / "copy").read_bytes() if _manifest(tmp_path / "copy").exists() else b""
        found = _outcome(lambda: export(tmp_path / "copy", of, picture))
        if found is not None:
            directory = isinstance(found, ArchiveFailed) and name.endswith("a directory")
            assert directory or (isinstance(found, ArchiveRefused) and found.reason in ("newer", "damaged")), f"{name}: {found}"
            assert _manifest(tmp_path / "copy").read_bytes() == written
        else:
            found = _outcome(lambda: read(tmp_path / "copy", of))
            # A bit that rotted in a file is not read by an export; an import says so.
            assert found is None or name.startswith("byte "), f"{name}: {found}"
            replaced += found is None
        rmtree(tmp_path / "copy")
    assert replaced > 80


def _outcome(work: Callable[[], object]) -> ForebayError | None:
    try:
        work()
    except ForebayError as error:
        return error
    return None


def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """A file, a missing parent, a name with a line break, a directory that may not be written."""
    of = identity()
    picture = Picture.drawn(of, 10, 1)
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "no/such", tmp_path / "file/below"):
        with pytest.raises(ForebayError) as caught:
            export(path, of, picture)
        assert "\n" not in str(caught.value)
        with pytest.raises(ArchiveRefused) as refused:
            Reader(path, of)
        assert "\n" not in str(refused.value)
    odd = tmp_path / "a\nb"
    odd.mkdir()
    with pytest.raises(ArchiveRefused) as refused:
        Reader(odd, of)
    assert "\n" not in str(refused.value)


def test_a_link_leads_nowhere_outside(tmp_path: Path) -> None:
    """Files that are links are not followed, whatever they lead to, on the way out neither."""
    of = identity()
    picture = Picture.drawn(of, 100, 1)
    export(tmp_path / "a", of, picture)
    secret = tmp_path / "secret"
    secret.write_bytes(_manifest(tmp_path / "a").read_bytes())
    _manifest(tmp_path / "a").unlink()
    _manifest(tmp_path / "a").symlink_to(secret)
    with pytest.raises(ArchiveRefused, match=r"manifest\.json is a link"):
        Reader(tmp_path / "a", of)
    before = secret.read_bytes()
    with pytest.raises(ArchiveRefused, match=r"manifest\.json is a link"):
        export(tmp_path / "a", of, picture.cut(50))
    assert secret.read_bytes() == before
