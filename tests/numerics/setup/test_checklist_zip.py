"""The zip of a checklist: equal bytes for equal content, and one-line errors for anything else."""

import dataclasses
import hashlib
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numerics import __main__ as command
from numerics.errors import NumericsError
from numerics.setup import checklist_zip as snapshots
from numerics.setup.checklist_zip import Snapshot, read_snapshot, write_snapshot

SMALL = Snapshot(machine={"torch": "2"}, environment={}, packages={"numpy": "1"}, texts={"a.sh": "x\n"})
TABLE = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
NESTED = st.none() | st.dictionaries(st.text(max_size=5), TABLE, max_size=3)


@given(machine=TABLE, data=st.none() | TABLE, modules=NESTED)
def test_what_is_written_is_read(
    machine: dict[str, str],
    data: dict[str, str] | None,
    modules: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("zips") / "a.zip"
    written = dataclasses.replace(SMALL, machine=machine, data=data, modules=modules)
    write_snapshot(written, path)
    assert read_snapshot(path) == written


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    write_snapshot(SMALL, tmp_path / "a.zip")
    first = (tmp_path / "a.zip").read_bytes()
    write_snapshot(dataclasses.replace(SMALL, texts=dict(SMALL.texts)), tmp_path / "b.zip")
    assert (tmp_path / "b.zip").read_bytes() == first
    assert not list(tmp_path.glob(".*"))


def test_every_flipped_byte_and_every_truncation_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    write_snapshot(SMALL, path)
    content = path.read_bytes()
    refused = 0
    cuts = [content[:length] for length in range(0, len(content), 20)]
    flipped = []
    for place in range(0, len(content), 2):
        changed = bytearray(content)
        changed[place] ^= 1 << random.Random(place).randrange(8)
        flipped.append(bytes(changed))
    for damaged in [*cuts, *flipped]:
        path.write_bytes(damaged)
        try:
            assert read_snapshot(path) == SMALL
        except NumericsError:
            refused += 1
    assert refused > len(content) / 4


def members(**changed: bytes | None) -> dict[str, bytes]:
    """Members of a valid zip with changes and a manifest that fits them."""
    found = {f"{name}.json": b"{}" for name in ("machine", "environment", "packages")}
    found |= {name.replace("__", "."): content for name, content in changed.items() if content is not None}
    for name, content in changed.items():
        if content is None:
            del found[name.replace("__", ".")]
    return found


def save(path: Path, content: dict[str, bytes], manifest: Any = None) -> Path:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    listed = {"format": snapshots.FORMAT, "version": 1, "members": digests} | (manifest or {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (content | {"manifest.json": json.dumps(listed).encode()}).items():
            archive.writestr(name, data)
    return path


DEEP = b"[" * 100_000
BAD = {
    "a missing table": members(machine__json=None),
    "no object": members(machine__json=b"[1]"),
    "no text": members(machine__json=b'{"a": 1}'),
    "no table of tables": members(modules__json=b'{"a": "b"}'),
    "no JSON": members(packages__json=b"{"),
    "no UTF-8": members(packages__json=b"\xff\xfe\xfa"),
    "deep JSON": members(packages__json=DEEP),
    "an unknown constant": members(packages__json=b'{"a": NaN}'),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_unusable_members_are_one_line(
    content: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "a.zip", content)
    good = save(tmp_path / "b.zip", members())
    for pair in ([path, good], [good, path]):
        assert command.main(["check-config", "compare", *map(str, pair), "-o", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} ")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.zip", "b.zip"]


MANIFESTS = {
    "another format": {"format": "other"},
    "another version": {"version": 2},
    "a version that is a list": {"version": [1]},
    "no members": {"members": None},
    "a member too many": {"members": {"machine.json": "0" * 64}},
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_does_not_fit_is_an_error(manifest: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"a\.zip"):
        read_snapshot(save(tmp_path / "a.zip", members(), manifest))


def test_a_bomb_is_read_up_to_the_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MOST_BYTES", 1 << 20)
    path = save(tmp_path / "a.zip", members(**{"scripts/a": bytes(2 << 20)}))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(NumericsError, match="more than 1 MB"):
        read_snapshot(path)
    monkeypatch.setattr(snapshots, "MOST_MEMBERS", 3)
    with pytest.raises(NumericsError, match="5 members"):
        read_snapshot(path)


@pytest.mark.parametrize("kind", ["pipe", "absent", "folder", "empty", "text", "no folder"])
def test_a_path_that_is_no_zip_is_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.zip"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "no folder":
        path.write_text("")
        path = path / "b.zip"
    elif kind != "absent":
        path.write_text("text" if kind == "text" else "")
    assert command.main(["check-config", "compare", str(path), str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_zip_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "a.zip"):
        with pytest.raises(NumericsError, match="cannot be written"):
            write_snapshot(SMALL, path)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]
