"""Every changed bit of a sealed file is found; copies and files without a seal are readable."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.seal import digest, read_sealed, write_sealed

VALUE = {"loss": 3.25, "small": 1e-08, "names": ["seal", '"this_file": "'], "none": None}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("indent", [1, None])
def test_a_flipped_bit_of_any_byte_is_found(tmp_path: Path, indent: int | None) -> None:
    path, draw = tmp_path / "a.json", random.Random(0)
    (tmp_path / "b.txt").write_text("beside")
    write_sealed(path, VALUE, ["b.txt", "absent.txt"], indent)
    content = path.read_bytes()
    for byte in range(len(content)):
        flip(path, 8 * byte + draw.randrange(8))
        with pytest.raises(DamagedFileError, match=r"a\.json"):
            read_sealed(path)
        path.write_bytes(content)
    assert read_sealed(path)["seal"]["files"] == {"b.txt": digest(tmp_path / "b.txt")}


@settings(max_examples=50, deadline=None)
@given(value=st.dictionaries(st.text(), st.recursive(
    st.none() | st.booleans() | st.integers(-2**60, 2**60) | st.floats(-1e90, 1e90) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)), seed=st.integers())  # fmt: skip
def test_any_value_is_read_back_and_a_changed_digit_is_found(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any], seed: int
) -> None:
    path = tmp_path_factory.mktemp("seal") / "a.json"
    write_sealed(path, value)
    found = read_sealed(path)
    del found["seal"]
    assert found == {key: item for key, item in value.items() if key != "seal"}
    content = path.read_bytes()
    flip(path, random.Random(seed).randrange(8 * len(content)))
    with pytest.raises(UserError):
        read_sealed(path)


def test_a_copy_keeps_its_seal_and_a_file_without_one_is_readable(tmp_path: Path) -> None:
    write_sealed(tmp_path / "a.json", VALUE)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "a.json", tmp_path / "elsewhere" / "b.json")
    assert read_sealed(tmp_path / "elsewhere" / "b.json") == read_sealed(tmp_path / "a.json")
    (tmp_path / "old.json").write_text(json.dumps(VALUE))
    assert read_sealed(tmp_path / "old.json") == VALUE


def test_a_file_that_was_edited_or_formatted_anew_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_sealed(path, VALUE)
    for text in (path.read_text().replace("3.25", "3.5"), json.dumps(json.loads(path.read_text()))):
        path.write_text(text)
        with pytest.raises(DamagedFileError, match=r"a\.json was altered: SHA-256 is"):
            read_sealed(path)
