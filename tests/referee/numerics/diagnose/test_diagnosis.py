"""`python -m referee diagnose`: lines, files, the records that it compares, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from referee.__main__ import main
from tests.referee.numerics.diagnose.curves import benchmark, rounded, write

ONE = benchmark(60)


def losses(path: Path, values: Any) -> Path:
    return write(path, "".join(f"{value!r}\n" for value in map(float, values)))


def run(tmp_path: Path, other: Any, *options: str) -> Any:
    paths = [losses(tmp_path / "a.txt", ONE), losses(tmp_path / "b.txt", other)]
    assert main(["diagnose", *map(str, paths), "-o", str(tmp_path / "out"), *options]) == 0
    return json.loads((tmp_path / "out/diagnose.json").read_text())


def test_a_symptom_is_written_and_the_next_commands_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, rounded(ONE) * 1.03)
    assert (found["symptom"], found["step"], found["common_steps"]) == ("first-step difference", 1, 60)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "symptom: first-step difference, 60 common steps"
    commands = [line for line in printed if line.startswith("next")]
    assert len(commands) == 3
    config = json.loads(commands[0][commands[0].index("{") :])
    assert config["step"] == [0]  # the recorder counts from 0


def test_options(tmp_path: Path) -> None:
    found = run(tmp_path, ONE)
    assert (found["symptom"], found["next"], found["rows"]) == ("equal", [], [])
    other = ONE.copy()
    other[30] *= 1 + 1e-12
    found = run(tmp_path, other)
    assert (found["symptom"], found["next"]) == ("rounding", [])
    found = run(tmp_path, other, "--same")
    assert (found["symptom"], found["record_step"]) == ("not reproducible", 31)
    assert "md5" in found["next"][0]
    assert run(tmp_path, ONE * 1.003)["symptom"] == "beyond rounding"
    assert run(tmp_path, ONE * 1.003, "--dtype", "bfloat16")["symptom"] == "rounding"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a", "link", "named twice"),
        ("a", "later", "no common step"),
    ],
)
def test_bad_input_is_one_line(
    first: str, second: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(tmp_path / "a", ONE)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write(tmp_path / "later", b"step,loss\n99,3\n")
    paths = [str(tmp_path / name) for name in (first, second)]
    assert main(["diagnose", *paths, "-o", str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert "fix: " in lines[0]
    assert not (tmp_path / "out").exists()
