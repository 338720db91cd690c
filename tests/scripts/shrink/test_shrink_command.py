"""`make shrink` finds the smallest sizes that show the symptom, and writes a configuration that shows it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from configuration import commands
from gpt2.artifacts import run_record
from gpt2.config.config import load_config
from gpt2.config.dotconfig import read_symbols
from gpt2.system.errors import UserError
from scripts import study as study_command
from scripts.bisect import play
from scripts.shrink import __main__ as command
from study.runner.settings import StudySettings
from study.runner.study import Study
from tests.faults.in_process import InProcessExecutor
from tests.scripts.bisect.faulty_runs import HALF, train, workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workplace(tmp_path_factory.mktemp("place"), half=HALF) as folder:
        yield folder


@pytest.fixture(scope="module")
def overflowing(place: Path) -> Path:
    return train("HALF", "half", GPT2_MODEL_MINI="y", GPT2_BLOCK_SIZE="32", GPT2_MODEL_TINY="n")


def shrink(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    words = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr("sys.argv", ["scripts.shrink", *words])
    assert command.main() == 0


def test_a_killed_search_continues_to_the_smallest_sizes_and_they_show_the_symptom(
    overflowing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is in layer 1, so two layers are needed. It overflows with the fewest channels of a head, too."""
    played, count = play.Player.play, 0

    def kill(*args: Any, **options: Any) -> play.Played:
        nonlocal count
        count += 1
        if count > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return played(*args, **options)

    child = os.fork()
    if not child:
        monkeypatch.setattr(play.Player, "play", kill)
        shrink(monkeypatch, run=overflowing)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = overflowing.parents[1] / "shrink/HALF0"
    assert len((folder / "journal.jsonl").read_text().splitlines()) == 1 + 2
    shrink(monkeypatch, run=overflowing)
    printed = capsys.readouterr().out
    assert (
        "smallest: 2 layers, 1 head, width 8, 16 tokens, batch 1; at first 4 layers, 4 heads, width 128"
        in printed
    )
    assert f"next: cp {folder / 'defconfig'} .config && make olddefconfig && make" in printed
    Path(".config").write_text((folder / "defconfig").read_text())
    commands.olddefconfig()
    config, study = load_config(".config"), StudySettings.from_symbols(read_symbols(".config"))
    assert (config.model.layers, config.model.heads, config.model.width) == (2, 1, 8)
    assert (study.name, study.variants) == ("shrink-HALF0", ("HALF",))
    lines = (folder / "journal.jsonl").read_text().splitlines()
    assert int(re.search(r"journal: (\d+) trials computed", printed)[1]) == len(lines) - 1 - 2


def test_a_run_without_the_symptom_is_refused(
    place: Path, overflowing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, message in (
        ({"symptom": "differs"}, "SYMPTOM=differs needs another run; fix: AGAINST=results/y/runs/B0"),
        ({"against": "nowhere"}, "AGAINST=nowhere is not a run folder; fix: make shrink RUN="),
        ({"symptom": "spike"}, "HALF0 shows no symptom: a loss spike"),
        ({"run": "nowhere"}, "RUN=nowhere is not a run folder; fix: make shrink RUN="),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            shrink(monkeypatch, **({"run": overflowing} | given))


def test_a_difference_of_two_runs_shrinks_while_it_persists(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference acts in layer 1 from step 4 on, so two layers are needed."""
    (place / "custom/shifted.py").write_text(HALF.replace("2e4 / y", "1e4 / y").replace("140", "14"))
    first, second = train("SHIFTED", "first"), train("B", "second")
    shrink(monkeypatch, run=first, against=second)
    printed = capsys.readouterr().out
    assert "trials: up to 4 steps of both runs from the initial weights" in printed
    assert "smallest: 2 layers, 1 head, width 8, 16 tokens, batch 1; at first 2 layers, 2 heads" in printed
    folder = first.parents[1] / "shrink/SHIFTED0"
    names = []
    for path in (folder / "defconfig", folder / "defconfig-against"):
        Path(".config").write_text(path.read_text())
        commands.olddefconfig()
        study = StudySettings.from_symbols(read_symbols(".config"))
        names.append((study.name, study.variants, load_config(".config").model.layers))
    assert names == [("shrink-SHIFTED0", ("SHIFTED",), 2), ("shrink-SHIFTED0-against", ("B",), 2)]
    runs = "RUN=results/shrink-SHIFTED0/runs/SHIFTED0 AGAINST=results/shrink-SHIFTED0-against/runs/B0"
    assert f"then: make bisect {runs}\n" in printed
    asked = len((folder / "journal.jsonl").read_text().splitlines())
    shrink(monkeypatch, run=first, against=second)
    assert len((folder / "journal.jsonl").read_text().splitlines()) == asked  # nothing is computed twice


def test_make_with_the_smallest_configuration_shows_the_symptom(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = train("B", "wrong", GPT2_MAX_ITERS="30", LEARNING_RATE="1", WEIGHT_DECAY="10")
    shrink(monkeypatch, run=wrong)
    Path(".config").write_text((wrong.parents[1] / "shrink/B0/defconfig").read_text())
    commands.olddefconfig()
    monkeypatch.setattr("sys.argv", ["scripts.study"])
    monkeypatch.setattr(Study, "admit", lambda study: None)
    monkeypatch.setattr(Study, "executor", lambda study: InProcessExecutor())
    with mock.patch.dict(os.environ):
        assert study_command.main()
    record = run_record.load(Path("results/shrink-B0/runs/B0"))
    assert record.status == "failed"
    assert record.faults
    assert record.batch == run_record.Batch(1, 1, 1, 1, 16)


def test_the_command_restarts_in_the_environment_of_the_run_and_ends(overflowing: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    command = [sys.executable, "-m", "scripts.shrink", f"--run={overflowing}", "--symptom=spike"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert "error: HALF0 shows no symptom: a loss spike" in found.stderr
