"""logp_diff: its definition, files of each type, what the advice says, one line for unusable input."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.__main__ import main
from referee.numerics import NumericsError, logp_diff
from referee.numerics.runs.logp_diff import advice, compare_files


def loop(rollout: Any, training: Any, mask: Any) -> tuple[float, float]:
    """The definition, written out: verl's masked_mean of both sides by sequence, then their difference's mean."""
    means, absolutes = [], []
    for a, b, m in zip(rollout, training, mask, strict=True):
        count = sum(1 for flag in m if flag)
        of_rollout = math.fsum(x for x, flag in zip(a, m, strict=True) if flag) / count
        of_training = math.fsum(x for x, flag in zip(b, m, strict=True) if flag) / count
        means.append(of_rollout - of_training)
        absolutes.append(math.fsum(abs(x - y) for x, y, flag in zip(a, b, m, strict=True) if flag) / count)
    return math.fsum(means) / len(means), math.fsum(absolutes) / len(absolutes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
    sequences, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))

    def matrix(element: st.SearchStrategy[Any]) -> Any:
        row = st.lists(element, min_size=tokens, max_size=tokens)
        return draw(st.lists(row, min_size=sequences, max_size=sequences))

    mask = matrix(st.integers(0, 1))
    for row in mask:
        row[draw(st.integers(0, tokens - 1))] = 1
    return matrix(st.floats(-30, 0, width=32)), matrix(st.floats(-30, 0, width=32)), mask


@given(cases(), st.floats(0, 1), st.sampled_from([math.nan, math.inf, 1e300]))
def test_it_is_the_definition_whatever_is_outside_the_mask(case: Any, threshold: float, other: float) -> None:
    rollout, training, mask = case
    changed = [
        [x if flag else other for x, flag in zip(row, flags, strict=True)]
        for row, flags in zip(rollout, mask, strict=True)
    ]
    found = logp_diff(changed, training, mask, threshold)
    value, absolute = loop(*case)
    assert found.value == pytest.approx(value, abs=1e-9)
    assert found.mean_absolute == pytest.approx(absolute, abs=1e-9)
    expected = [
        (number, place)
        for number, (a, b, m) in enumerate(zip(*case, strict=True))
        for place, (x, y, flag) in enumerate(zip(a, b, m, strict=True))
        if flag and abs(x - y) > threshold
    ]
    first = next(iter(found.over.items()), None)
    assert (first and (first[0], found.positions[first[0]][first[1]])) == (expected or [None])[0]


# Rollout, where training is -1 for each token: verdict, and whether decoding alone is accused.
ADVICE: dict[str, tuple[list[list[float]], str, bool]] = {
    "later tokens alone": ([[-1.0, -1.5, -1.5], [-1.0, -1.0, -1.3]], "over the threshold", True),
    "signs cancel": ([[-1.0, -1.5, -0.5]], "differences of both signs cancel", True),
    "signs cancel from the first token on": ([[-1.5, -0.5, -1.0]], "differences of both signs cancel", False),
    "first tokens of two sequences cancel": ([[-1.5, -3.0], [-0.5, -3.0]], "over the threshold", False),
    "the first token of one sequence": ([[-1.0, -3.0], [-1.5, -3.0]], "over the threshold", False),
    "first tokens nearly over": ([[-1.009, -1.02, -1.02]], "over the threshold", False),
    "one token a sequence": ([[-1.5], [-1.4]], "over the threshold", False),
    "NaN in the first token": ([[math.nan, -1.0]], "over the threshold", False),
    "NaN later": ([[-1.0, math.nan]], "over the threshold", True),
}


@pytest.mark.parametrize("name", ADVICE)
def test_decoding_alone_is_accused_only_where_first_tokens_agree(name: str) -> None:
    rollout, verdict, decoding = ADVICE[name]
    found = logp_diff(rollout, -np.ones_like(rollout))
    assert found.verdict == verdict
    assert ("only decoding" in advice(found)) == decoding


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([[-1.0]], [[-1.0, -1.0]]), "shape"),
        (([[-1.0], [-1.0]], [[-1.0], [-1.0]], [[1], [0]]), "sequence 1 has no response tokens"),
        (([[-1.0]], [[-1.0]], [[math.nan]]), "NaN"),
        (([[-1.0]], [[-1.0]], None, math.nan), "threshold"),
    ],
)
def test_unusable_input_is_an_error_with_a_fix(arguments: Any, word: str) -> None:
    with pytest.raises(NumericsError, match=rf"{word}.*fix:"):
        logp_diff(*arguments)


# -- files

ROLLOUT, TRAINING = [[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]], [[-1.0, -2.0, -3.5], [-1.0, -2.25, 0.0]]
MASK = [[0, 1, 1], [1, 1, 0]]


def save(path: Path, values: Any, mask: Any) -> Path:
    content = {"log_probs": values, "response_mask": mask}
    match path.suffix:
        case ".npz":
            np.savez(path, **{name: np.asarray(part) for name, part in content.items()})
        case ".json":
            path.write_text(json.dumps(content))
        case ".jsonl":
            rows = [dict(zip(content, row, strict=True)) for row in zip(values, mask, strict=True)]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("suffixes", [(".npz", ".json"), (".jsonl", ".npz")])
def test_every_type_of_file_gives_the_same_result(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    a, b = (tmp_path / f"{name}{suffix}" for name, suffix in zip("ab", suffixes, strict=True))
    found = compare_files(save(a, ROLLOUT, MASK), save(b, TRAINING, MASK))
    assert found.value == (0.25 + 0.125) / 2
    assert [len(row) for row in found.differences] == [2, 2]


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save(tmp_path / "a.npz", ROLLOUT, MASK), save(tmp_path / "b.npz", TRAINING, MASK)
    assert main(["logp-diff", str(a), str(b), "-o", str(tmp_path / "out")]) == 0
    assert "logp_diff: over the threshold" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "logp_diff.json").read_text())
    assert content["value"] == 0.1875
    assert (content["differences"], content["positions"]) == ([[0.0, 0.5], [0.0, 0.25]], [[1, 2], [0, 1]])


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


UNUSABLE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "absent": ("a.npz", lambda path: None),
    "pipe": ("a.npz", os.mkfifo),
    "damaged zip": ("a.npz", text("PK\x03\x04")),
    "pickle": ("a.npz", lambda path: np.savez(path, log_probs=np.array([{"a": 1}], dtype=object))),
    "no key": ("a.json", text('{"x": [[1]]}')),
    "two keys": ("a.json", text('{"log_probs": [[1]], "logp": [[1]]}')),
    "mask of another length": ("a.json", text('{"log_probs": [[1, 2]], "mask": [[1]]}')),
    "some masks": ("a.jsonl", text('{"logp": [1], "mask": [1]}\n{"logp": [1]}\n')),
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
