"""`make card`: every command of docs/card.md in its CPU form, a faked H200, failures, kills and what they keep."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import card, card_checks, card_kernels, card_speed, card_studies
from bench.card_checks import DIFFERS, MEASURED, NOT_RUN, PASS, CardCheck, CheckedDevice, NotRunError, judge
from bench.cases import Shape, Sizes
from bench.runner import BenchWorker
from runtime import attention_kernels
from runtime.errors import UserError
from study.make_arguments import variables_by_target
from study.study import Study
from tests.bench.test_card_checks import H200

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "card.md").read_text()
COMMANDS = re.findall(r"(?:make(?: PYTHON=python3)? card|python3 -m bench\.card)(?: [^\n`#]*)?", PAGE)


def start(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> int:
    """Run the command."""
    monkeypatch.setattr(sys, "argv", ["card", "--out", str(out), *words])
    return card.main()


def lines(out: Path) -> dict[str, dict[str, Any]]:
    """The checks by their names, without the headings of commands."""
    texts = (out / "card.jsonl").read_text().splitlines()
    rows = [json.loads(text) for text in texts if text.endswith("}")]
    return {row["name"]: row for row in rows if "schema" not in row}


def agrees(device: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("agrees", "1", "1", True)


def differs(device: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("differs", "1", "2 and 3", False)


def raises(device: CheckedDevice) -> Iterator[CardCheck]:
    yield judge("before", "1", "1", True)
    raise RuntimeError("first line\nsecond line")


def cannot(device: CheckedDevice) -> Iterator[CardCheck]:
    raise NotRunError("no such kernel")
    yield


def test_a_check_that_fails_or_raises_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = {"a": differs, "b": raises, "c": cannot, "d": agrees}
    monkeypatch.setattr(card, "QUESTIONS", questions)
    assert start(monkeypatch, tmp_path, "--checks", "a b c d") == 1
    verdicts = {name: row["verdict"] for name, row in lines(tmp_path).items()}
    assert verdicts == {
        "differs": DIFFERS, "before": PASS, "b: the rest": DIFFERS, "c: the rest": NOT_RUN, "agrees": PASS,
    }  # fmt: skip
    ending = capsys.readouterr().out.partition("Lines that differ")[2]
    assert "2 and 3" in ending
    assert "agrees" not in ending
    assert start(monkeypatch, tmp_path, "--checks", "d") == 0  # earlier lines do not count
    with pytest.raises(UserError, match="words of: first second third a b"):
        start(monkeypatch, tmp_path, "--checks", "speeed")
    file = tmp_path / "card.jsonl"
    file.write_text(file.read_text().replace('"device": "', '"device": "another '))
    with pytest.raises(UserError, match="another folder"):
        start(monkeypatch, tmp_path, "--checks", "d")


# ---- the CPU form


def make_small() -> None:
    """Give every question sizes of a second."""
    small = Shape("small", 1, 1, 16, 16, plain_micro=2)
    card_speed.SMALL, card_speed.SECONDS = small, {True: 0.0}
    card_speed.WINDOWS, card_speed.ITEMS = {True: 2}, {True: 2}
    card_kernels.SHAPES[True] = ((2, 2, 24, 8), (2, 2, 20, 8))
    card_checks.SHAPES[True] = Sizes("small", 2, 2, 64, 64)
    card_studies.BUDGET_SECONDS[True] = 1


def call_here(worker: BenchWorker, function: Any, *arguments: Any, limit_seconds: float | None = None) -> Any:
    return function(*arguments)


KILLED = """
from tests.bench.test_card import *
make_small()
BenchWorker.__init__, BenchWorker.__exit__, BenchWorker.call = (lambda *_: None), (lambda *_: None), call_here
sys.exit(card.main())
"""


@pytest.mark.parametrize("count", [2, 7, 9])  # in the facts, among the speeds, among the kernels
def test_a_killed_command_keeps_every_line_it_printed_and_the_next_one_reads_them(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", KILLED, "--out", str(tmp_path), "--checks", "facts speed kernels shapes"]
    printed = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()  # the device
        printed = [process.stdout.readline() for _ in range(count)]
        process.kill()
    kept = lines(tmp_path)
    assert [CardCheck(**row).line for row in kept.values()][:count] == [text.rstrip("\n") for text in printed]
    with (tmp_path / "card.jsonl").open("a") as file:
        file.write('{"name": "cut in the mid')
    monkeypatch.setattr(card, "QUESTIONS", {"ask": lambda device: iter([number_of_speeds(device)])})
    assert start(monkeypatch, tmp_path, "--checks", "ask") == 0
    speeds = [row for row in kept.values() if row["name"].startswith("speed: ")]
    assert lines(tmp_path)["speeds"]["value"] >= len(speeds)


def number_of_speeds(device: CheckedDevice) -> CardCheck:
    return card_checks.number("speeds", "", "", sum(name.startswith("speed: ") for name in device.values))


@pytest.mark.slow
@pytest.mark.usefixtures("workers_here")
def test_every_command_of_the_page_runs_in_its_cpu_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In turn, in one folder: a later command needs what an earlier one measured."""
    for module, names in ((card_speed, ("SMALL", "SECONDS", "WINDOWS", "ITEMS")),):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    for table in (card_kernels.SHAPES, card_checks.SHAPES, card_studies.BUDGET_SECONDS):
        monkeypatch.setitem(table, True, table[True])  # type: ignore[index]
    make_small()
    monkeypatch.setattr("study.planner.TIMING_LEAST", 1.0)
    monkeypatch.setattr(Study, "report", lambda study: None)  # seconds of each start
    monkeypatch.setattr("study.study.render_terminal", lambda report: "")
    asked: set[str] = set()
    for command in COMMANDS:
        arguments = dict(re.findall(r"(OUT|CHECKS)=(.*)", "\n".join(shlex.split(command))))
        chosen = arguments.get("CHECKS", "first")
        if chosen not in asked:
            asked.add(chosen)
            assert start(monkeypatch, tmp_path, "--checks", chosen) == 0
        assert set(arguments) <= set(variables_by_target((ROOT / "Makefile").read_text())["card"])
    assert asked >= {*card.PARTS}
    found = lines(tmp_path)
    questions = {question for part in card.PARTS.values() for question in part}
    assert questions == {*card.QUESTIONS} == set(re.findall(r"^\|[^|]*\| `([\w-]+)` \|", PAGE, re.MULTILINE))
    assert {row["verdict"] for row in found.values()} == {PASS, MEASURED, NOT_RUN}
    equal = [name for name in found if name.startswith("study: resumed losses")]
    assert [found[name]["measured"] for name in equal] == ["equal to the bit"] * 2
    assert all(row["seconds"] >= 0 for row in found.values())


# ---- an H200 that is not there


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (card, attention_kernels):
        monkeypatch.setattr(module, "resolve", lambda *settings, **devices: H200)

    monkeypatch.setattr(card_studies, "detected_target_name", lambda: "h200")

    def first_kernel(study: Study) -> int:
        assert study.config.model.block_size == 1024
        raise RuntimeError("the first kernel of CUDA")

    monkeypatch.setattr(card_studies.CardStudy, "run", first_kernel)


@pytest.mark.usefixtures("workers_here", "faked")
def test_on_a_faked_card_every_question_gets_to_its_first_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong name or argument before that would cost the first minutes on a card."""
    assert start(monkeypatch, tmp_path, "--checks", "first second third") == 1
    for name, row in lines(tmp_path).items():
        assert row["verdict"] in (MEASURED, DIFFERS)
        assert row["verdict"] == MEASURED or re.search("cuda", row["measured"], re.IGNORECASE), (name, row)


def test_a_slow_card_is_measured_and_a_wrong_one_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faked: None
) -> None:
    """The exit status of a card that is right but slow is 0."""
    sample = {"tokens_per_second": 1e5, "peak_bytes": 2**34, "flops_per_token": 8e8}
    right = card_kernels.KernelResult(3.0, (1e-3, 1e-3), (True, True))
    answers: dict[str, Any] = {
        "selected_kernels": lambda *_: ["cudnn", "cudnn"],
        "measure_kernel": lambda device, dtype, kernel, shape: replace(
            right, milliseconds=float(len(kernel))
        ),
        "time_case": lambda *_: sample,
        "evaluate_once": lambda *_: {"validation": 9.0, "HellaSwag": 90.0},
    }
    monkeypatch.setattr(BenchWorker, "__init__", lambda *_: None)
    monkeypatch.setattr(BenchWorker, "__exit__", lambda *_: None)
    monkeypatch.setattr(
        BenchWorker, "call", lambda worker, f, *arguments, limit_seconds: answers[f.__name__](*arguments)
    )
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
    checks = ("--checks", "speed kernels plain evaluation default-micro")
    assert start(monkeypatch, tmp_path, *checks) == 0
    found = lines(tmp_path)
    speed = found["speed: B, 124m-t1024, micro-batch 64"]
    assert (speed["verdict"], speed["expected"]) == (MEASURED, "450,000 to 520,000")
    assert found["speed: B, 124m-t1024, micro-batch 64, MFU"]["value"] == pytest.approx(
        8e13 / 989e12, rel=1e-3
    )
    assert found["kernels: speed"]["value"] == 1.0
    answers["measure_kernel"] = lambda *_: replace(right, errors=(0.3, 1e-3))
    assert start(monkeypatch, tmp_path, *checks) == 1
