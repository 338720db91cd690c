"""`python -m numerics logp-diff`: files of each type, and one line for unusable ones."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numerics.__main__ import main
from numerics.logp.files import compare_files

ROLLOUT = [[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]]
TRAINING = [[-1.0, -2.0, -3.5], [-1.0, -2.25, 0.0]]
MASK = [[0, 1, 1], [1, 1, 0]]


def save(path: Path, values: Any, mask: Any = None) -> Path:
    content = {"log_probs": values} | ({} if mask is None else {"response_mask": mask})
    match path.suffix:
        case ".npz":
            np.savez(path, **{name: np.asarray(part) for name, part in content.items()})
        case ".npy":
            np.save(path, np.asarray(values))
        case ".json":
            path.write_text(json.dumps(content))
        case ".jsonl":
            rows = [dict(zip(content, row, strict=True)) for row in zip(*content.values(), strict=True)]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "suffixes", [(".npz", ".npz"), (".json", ".jsonl"), (".jsonl", ".npz"), (".json", ".npy")]
)
def test_every_type_of_file_gives_the_same_result(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    a, b = (tmp_path / f"{name}{suffix}" for name, suffix in zip("ab", suffixes, strict=True))
    found = compare_files(save(a, ROLLOUT, MASK), save(b, TRAINING, MASK))
    assert found.value == (0.25 + 0.125) / 2
    assert [one.tokens for one in found.sequences] == [2, 2]


def test_sequences_of_json_lines_may_have_different_lengths(tmp_path: Path) -> None:
    for name, rows in (("a.jsonl", [[-1.0, -2.0], [-3.0]]), ("b.jsonl", [[-1.0, -2.5], [-3.0]])):
        (tmp_path / name).write_text("\n".join(json.dumps({"logprobs": row}) for row in rows))
    found = compare_files(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert found.value == 0.125
    assert [one.tokens for one in found.sequences] == [2, 1]


def test_a_json_file_may_hold_a_list_of_objects(tmp_path: Path) -> None:
    rows = [{"log_probs": [-1.0, -2.0], "mask": [0, 1]}, {"log_probs": [-3.0], "mask": [1]}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text('[{"logp": [-1.5, -2.5]}, {"logp": [-3.0]}]')
    found = compare_files(tmp_path / "a.json", tmp_path / "b.json")
    assert found.value == 0.25
    assert [one.tokens for one in found.sequences] == [1, 1]


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save(tmp_path / "a.npz", ROLLOUT, MASK), save(tmp_path / "b.npz", TRAINING, MASK)
    assert main(["logp-diff", str(a), str(b), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "logp_diff: over the threshold" in printed
    assert "sequence 0, response token 1 (position 2)" in printed
    assert "KV cache" in printed
    content = json.loads((tmp_path / "out" / "logp_diff.json").read_text())
    assert content["verdict"] == "over the threshold"
    assert content["logp_diff"] == 0.1875
    assert content["first_over"] == {
        "sequence": 0,
        "position": 2,
        "response": 1,
        "rollout": -3.0,
        "training": -3.5,
    }
    assert content["per_token"] == [[0.0, 0.0, 0.5], [0.0, 0.25, 0.0]]
    assert main(["logp-diff", str(a), str(b), "--threshold", "0.5"]) == 0
    assert "within the threshold" in capsys.readouterr().out


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def pickled(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.array([{"a": 1}], dtype=object))
    path.with_suffix(".npy").rename(path)


UNUSABLE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "absent": ("a.npz", lambda path: None),
    "folder": ("a.json", Path.mkdir),
    "pipe": ("a.npz", os.mkfifo),
    "type": ("a.txt", text("1")),
    "empty": ("a.npz", text("")),
    "empty json": ("a.json", text("")),
    "empty lines": ("a.jsonl", text("\n")),
    "no zip": ("a.npz", text("text")),
    "damaged npy": ("a.npy", text("\x93NUMPY")),
    "pickle": ("a.npy", pickled),
    "number": ("a.json", text("1")),
    "text": ("a.json", text('"a"')),
    "no key": ("a.json", text('{"x": [[1]]}')),
    "two keys": ("a.json", text('{"log_probs": [[1]], "logp": [[1]]}')),
    "words": ("a.json", text('{"log_probs": [["a"]]}')),
    "a number as rows": ("a.json", text('{"log_probs": 1}')),
    "deep": ("a.json", text("[" * 100_000)),
    "deeper rows": ("a.json", text("[[[1]]]")),
    "mixed rows": ("a.json", text("[[1], 2]")),
    "no rows": ("a.json", text("[]")),
    "rows without tokens": ("a.json", text("[[], []]")),
    "mask of another length": ("a.json", text('{"log_probs": [[1, 2]], "mask": [[1]]}')),
    "mask of another count": ("a.json", text('{"log_probs": [[1], [2]], "mask": [[1]]}')),
    "empty mask": ("a.json", text('{"log_probs": [[1, 2]], "mask": [[0, 0]]}')),
    "mask that is a number": ("a.json", text('{"log_probs": [[1, 2]], "mask": 1}')),
    "some masks": ("a.jsonl", text('{"logp": [1], "mask": [1]}\n{"logp": [1]}\n')),
    "some masks of objects": ("a.json", text('[{"logp": [1], "mask": [1]}, {"logp": [1]}]')),
    "objects and numbers": ("a.json", text('[{"logp": [1]}, 2]')),
    "a bad line": ("a.jsonl", text('{"logp": [1]}\n{"logp": [1\n')),
    "not UTF-8": ("a.json", lambda path: path.write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize(("name", "write"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_one_line(
    tmp_path: Path, name: str, write: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    write(path)
    assert main(["logp-diff", str(path), str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_unequal_shapes_and_masks_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a.npz", ROLLOUT, MASK)
    for values, mask in ((ROLLOUT[:1], MASK[:1]), (ROLLOUT, [[1, 1, 1], [1, 1, 1]])):
        b = save(tmp_path / "b.npz", values, mask)
        assert main(["logp-diff", str(a), str(b)]) == 1
        assert capsys.readouterr().err.count("\n") == 1
