"""Several runs at once on this machine: the numbers are those of one run at a time."""

import json
import os
import signal
from pathlib import Path

import pytest

from study.runner.status_text import beside_note
from tests.faults.workplace import PATIENCE_SECONDS, Workplace, injected, wait_for, write_stories

SETTINGS = {"VARIANTS": "B", "SEEDS": "2", "GPT2_MAX_ITERS": "20"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_slots_have_the_numbers_of_one_to_the_bit(tmp_path: Path) -> None:
    """The study with two slots is interrupted while both train. Both save, and the next `make` continues them."""
    texts = write_stories(tmp_path / "texts")
    one = Workplace(tmp_path / "one", texts, **SETTINGS)
    done = one.command("scripts.study")
    assert done.returncode == 0, done.stdout
    assert "at once" not in done.stdout
    two = Workplace(tmp_path / "two", texts, SLOTS="2", **SETTINGS)
    process = two.start(**injected(None, slower=0.3))
    wait_for(lambda: min(two.steps("B0"), two.steps("B1")) > 2)
    two.send(signal.SIGSTOP, "scripts.train")  # not over before the next command has started
    status = two.command("scripts.status", MAKEFLAGS=f"-- STUDY={two.study}").stdout
    assert [line.split()[:2] for line in status.splitlines()[2:4]] == [["B0", "running"], ["B1", "running"]]
    assert "slot 0" in status.splitlines()[2]
    assert "slot 1" in status.splitlines()[3]
    two.send(signal.SIGCONT, "scripts.train")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, output
    assert not two.orphans()
    assert [two.status(name) for name in ("B0", "B1")] == ["interrupted"] * 2
    assert output.count("stopped, saved") == 2
    done = two.command("scripts.study")
    assert done.returncode == 0, done.stdout
    assert "2 of 2 runs pending, 2 at once" in done.stdout
    assert "all runs are finished" in two.command("scripts.status").stdout
    for name in ("B0", "B1"):
        assert two.numbers(name) == one.numbers(name)
    assert beside_note(2) in json.loads((two.study / "report.json").read_text())["notes"]
