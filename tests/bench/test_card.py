"""`make card`: its command from beginning to end with small shapes, and failures of checks."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import card as run
from bench import card as script
from bench import card_checks as gates
from bench import card_kernels as kernels
from bench.card_checks import CardCheck, CheckedDevice, NotRunError, Question, judge
from bench.cases import Sizes


def agrees(card: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("agrees", "1", "1", True)


def differs(card: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("differs", "1", "2 and 3", False)


def raises(card: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("before", "1", "1", True)
    raise RuntimeError("first line\nsecond line")


def cannot(card: CheckedDevice) -> Iterator[CardCheck]:
    raise NotRunError("no such kernel")
    yield


def start(monkeypatch: pytest.MonkeyPatch, out: Path, chosen: str = "", **questions: Question) -> int:
    """Run the command with these questions."""
    monkeypatch.setattr(run, "QUESTIONS", questions)
    monkeypatch.setattr(sys, "argv", ["card", "--out", str(out), "--checks", chosen])
    return script.main()


class Here:
    """Calls functions in this process in place of a worker."""

    def __init__(self, label: str) -> None: ...
    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None: ...
    def call(self, function, *arguments, limit_seconds=None):  # type: ignore[no-untyped-def]
        return function(*arguments)


def test_a_check_that_fails_or_raises_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = start(monkeypatch, tmp_path, a=differs, b=raises, c=cannot, d=agrees)
    saved = json.loads((tmp_path / "card.json").read_text())["checks"]
    assert status == 1
    assert [(row["name"], row["verdict"]) for row in saved] == [
        ("differs", "differs"),
        ("before", "pass"),
        ("b", "differs"),
        ("c", "not run"),
        ("agrees", "pass"),
    ]
    ending = capsys.readouterr().out.partition("What to send back")[2]
    assert "differs: expected 1; measured: 2" in ending
    assert "agrees" not in ending
    assert "2 and 3" in (tmp_path / "card.html").read_text()


def test_the_command_checks_kernels_and_gates_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(kernels.SHAPES, True, ((2, 2, 24, 8),))
    monkeypatch.setitem(gates.SHAPES, True, Sizes("small", 2, 2, 64, 64))
    monkeypatch.setitem(gates.LIMITS, "bfloat16", 0.5)
    for module in (kernels, gates):
        monkeypatch.setattr(module, "BenchWorker", Here)
    status = start(monkeypatch, tmp_path, kernels=kernels.kernel_checks, gates=gates.gate_checks)
    saved = json.loads((tmp_path / "card.json").read_text())
    verdicts = {row["name"]: row["verdict"] for row in saved["checks"]}
    assert status == 0
    assert verdicts == {
        "kernels: order": "pass",
        "kernels: flash, 2 x 2 x 24 x 8": "pass",
        "kernels: cudnn, 2 x 2 x 24 x 8": "not run",
        "kernels: efficient, 2 x 2 x 24 x 8": "not run",
        "kernels: speed": "not run",
        "gate gradients: float32": "pass",
        "gate gradients: bfloat16": "pass",
        "gate gradients: bfloat16 compiled": "not run",
    }
    assert saved["target"]["name"] == "cpu"
