"""The zip of a checklist: equal bytes for equal content, and one-line errors for anything else."""

import contextlib
import json
import random
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee import __main__ as command
from referee.errors import NumericsError
from referee.numerics.setup import checklist_rows
from referee.numerics.setup.checklist_rows import read_checklist, write_checklist

SMALL = {"machine": {"torch": "2"}, "environment": {}, "packages": {"numpy": "1"}}
TABLE = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@given(machine=TABLE, data=TABLE)
def test_what_is_written_is_read(
    machine: dict[str, str], data: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("zips") / "a.zip"
    written = SMALL | {"machine": machine, "data": data}
    write_checklist(written, path)
    assert read_checklist(path) == written
    first = path.read_bytes()
    write_checklist(written, path)
    assert path.read_bytes() == first


@given(seed=st.integers(0, 1000))
def test_a_damaged_zip_is_an_error_or_has_the_same_content(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, draws = tmp_path_factory.mktemp("zips") / "a.zip", random.Random(seed)
    write_checklist(SMALL, path)
    content = bytearray(path.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    path.write_bytes(content[: draws.randrange(len(content))] if seed % 2 else content)
    with contextlib.suppress(NumericsError):
        assert read_checklist(path) == SMALL


def save(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(checklist_rows.MEMBER, content)
    return path


BAD = {
    "no version": b"{}",
    "another version": b'{"version": 1}',
    "no table": b'{"version": 2, "machine": [1]}',
    "no JSON": b"{",
    "deep JSON": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_an_unusable_document_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "a.zip", content)
    good = save(tmp_path / "b.zip", json.dumps({"version": 2} | SMALL).encode())
    for pair in ([path, good], [good, path]):
        assert command.main(["check-config", "compare", *map(str, pair), "-o", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} ")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
