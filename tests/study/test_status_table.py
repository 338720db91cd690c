"""`make status`: what the files of a study say about each run. For a study that runs see test_local."""

import json
import math
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from referee.pages.document import render_markdown
from runtime.attempt import PLACE, Fence
from runtime.batch_plan import BatchPlan
from runtime.output import duration
from runtime.settings import load_config
from scripts import status as command
from study import plan_file
from study.plan_file import CostClass, Plan, PlanBudget, PlanRow
from study.preconditions import locked
from study.report.report_data import build_report
from study.report.report_page import report_document
from study.runs import EXPECTED, Expected
from study.status_table import status_text
from study.terminal import START_SECONDS, expected_seconds
from study.verify import verify_study
from tests.checked_files import write_checked
from tests.kconfig_commands import defconfig
from tests.study.executors import fake_slurm
from tests.study.sample_records import a_record


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Four planned runs of 100 s: one finished, one half done, one failed, one not started."""
    plan = Plan(
        batch=BatchPlan(4, 4, 1, 1, 16),
        budget=PlanBudget(100, 0, 0),
        classes={"standard": CostClass(1.0)},
        variants={"B": PlanRow("standard", 100, 100 * 64)},
    )
    write_checked(tmp_path / EXPECTED, Expected(("B",), 4).to_json())
    for seed, status in enumerate(("finished", "running", "failed")):
        (tmp_path / "runs" / f"B{seed}").mkdir(parents=True)
        error = "a reason" if status == "failed" else None
        record = a_record("B", seed, 4.0) | {"status": status, "error": error}
        record["clock"] = dict.fromkeys(record["clock"], 20.0)
        write_checked(tmp_path / "runs" / f"B{seed}" / "run.json", record)
    lines = [
        {"event": "train", "iteration": n, "loss": 5.0, "tokens": 1234 * n, "train_seconds": n}
        for n in range(1, 51)
    ]
    lines.append({"event": "validation", "iteration": 50, "loss": 4.8, "perplexity": 121.51})
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "tr'
    (tmp_path / "runs" / "B1" / "metrics.jsonl").write_text(text)
    plan_file.write(tmp_path, plan)
    return tmp_path


def test_each_run_has_a_line_and_the_rest_is_estimated(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, "slot 1")
    with locked(study):
        Fence(study / "runs" / "B1")
        text = status_text(study)
    lines = text.splitlines()
    assert lines[0].endswith("4 runs, 1 finished, 1 running, 1 failed, 1 waiting")
    assert lines[2].split()[:3] == ["B0", "finished", "100%"]
    host = socket.gethostname()
    assert lines[3].split() == ["B1", "running", "50%", "ppl", "121.5", "1,234", host, "slot", "1"]
    assert lines[6] == "B2: a reason"
    assert lines[7].startswith(f"about {duration(2.5 * (100 + START_SECONDS))} left")  # 0.5 of B1, B2 and B3


def test_an_unfinished_run_shows_its_difference_to_b_at_equal_tokens(tmp_path: Path) -> None:
    """Else the last losses of two runs are compared, which are of other batches and other tokens."""
    for arm, losses in (("B", (5.0, 4.0, 3.0)), ("RAALL", (5.1, 4.0 + math.log(1.05)))):
        folder = tmp_path / "runs" / f"{arm}0"
        write_checked(folder / "run.json", a_record(arm, 0, 4.0) | {"status": "running", "validation": None})
        lines = [
            {
                "event": "validation",
                "iteration": n,
                "tokens": 64 * n,
                "loss": loss,
                "perplexity": math.exp(loss),
            }
            for n, loss in enumerate(losses, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (row,) = [line.split() for line in status_text(tmp_path).splitlines() if line.startswith("RAALL0")]
    assert "+5.00 % " in f"{' '.join(row)} "
    page = render_markdown(report_document(build_report(tmp_path), tmp_path))
    (row,) = [line.split(" | ") for line in page.splitlines() if "RAALL0" in line and "+5.00" in line]
    assert row[1:3] == ["running", "ppl 57.33"]


@pytest.mark.usefixtures("elsewhere")
def test_before_a_run_is_finished_the_estimate_has_starts_and_evaluations(study: Path) -> None:
    defconfig(spec="gpt2-ra-ablation-smoke")
    shutil.copy(".config", study / "config")
    (study / "runs" / "B0" / "run.json").unlink()
    plan = plan_file.read(study)
    assert plan
    each = expected_seconds(plan, load_config(".config").evaluation)
    assert each
    assert each > 100 + START_SECONDS
    with locked(study):
        Fence(study / "runs" / "B1")
        assert f"about {duration(3.5 * each)} left" in status_text(study)


def test_foreign_folders_and_copies_are_named_and_not_counted(study: Path) -> None:
    for name in (".ipynb_checkpoints", "B0.bak", "notes 2"):
        (study / "runs" / name).mkdir()
    shutil.copytree(study / "runs" / "B0", study / "runs" / "copy of B0")
    text = status_text(study)
    assert "5 runs" in text
    assert all(
        f"{name}: not a run of this study" in text for name in (".ipynb_checkpoints", "B0.bak", "notes 2")
    )
    skipped = {row.name for row in verify_study(study) if "skipped" in row.text}
    assert skipped == {".ipynb_checkpoints", "B0.bak", "notes 2"}


def test_a_run_whose_driver_has_ended_does_not_run(study: Path) -> None:
    Fence(study / "runs" / "B1")  # as after SIGKILL of all processes
    text = status_text(study)
    assert text.splitlines()[3].split()[:3] == ["B1", "interrupted", "50%"]
    assert text.splitlines()[-1].startswith("nothing runs now; `make` continues (about 4m")
    at = time.time() - 60
    os.utime(study / "runs" / "B1" / "attempt", (at, at))
    with locked(study):  # the next driver has not started it yet
        assert status_text(study).splitlines()[3].split()[:2] == ["B1", "interrupted"]


def test_the_jobs_of_a_study_in_slurm_are_asked_for(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_slurm.install(tmp_path / "cluster").items():
        monkeypatch.setenv(name, value)
    (study / "slurm").mkdir()
    (study / "slurm" / "ra-1.tasks").write_text("/s/runs/B1/plan.json\n/s/runs/B3/plan.json\n")
    states = [{"state": "RUNNING"}, {"state": "PENDING"}]
    jobs = [{"array": 1, "index": n, "name": "ra-1", "process": 0} | state for n, state in enumerate(states)]
    fake_slurm.write(tmp_path / "cluster", jobs)
    assert "1 finished, 1 running, 1 failed, 1 queued" in status_text(study).splitlines()[0]


def test_a_run_with_a_damaged_record_is_not_shown_as_waiting(study: Path) -> None:
    (study / "runs" / "B0" / "run.json").write_text('{"x"')
    assert status_text(study).splitlines()[2].split()[:2] == ["B0", "damaged"]


@pytest.mark.usefixtures("elsewhere")
def test_seeds_and_variants_that_the_last_make_did_not_know_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts.status"])
    directory = Path("results/few")
    (directory / "runs").mkdir(parents=True)
    write_checked(directory / EXPECTED, Expected(("B", "RAALL"), 2).to_json())

    def said(*assignments: str) -> str:
        defconfig("CONFIG_STUDY_NAME=few", *assignments, spec="gpt2-ra-ablation-smoke")
        capsys.readouterr()
        assert command.main() == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert ".config" not in said("CONFIG_VARIANTS=B RAALL", "CONFIG_SEEDS=2")
    more = said("CONFIG_VARIANTS=B RAALL", "CONFIG_SEEDS=3")
    assert more == ".config now asks for B RAALL at 3 seeds; `make` starts the missing runs"
    more = said("CONFIG_VARIANTS=B RAALL RALEARN", "CONFIG_SEEDS=1")
    assert more == ".config now asks for B RAALL RALEARN; `make` starts the missing runs"
