"""`make lm-eval`: results beside the runs, nothing repeated, arms paired, and what is refused."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime import checkpoint, run_record
from study.evaluation.lm_eval_page import CHANCE, TRUNCATED, Result, results_of
from study.evaluation.lm_eval_runs import load_tasks
from study.evaluation.loaded_runs import load_run
from study.verify import verify_study
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories
from tests.study.evaluation.conftest import NAMES, write_task_data

pytestmark = pytest.mark.slow
SETTINGS = {"VARIANTS": "B RALEARN", "SEEDS": "2", "GPT2_MAX_ITERS": "12", "MICRO_BATCH": "0"}
RUNS = ("B0", "RALEARN0", "B1", "RALEARN1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    place = Workplace(tmp_path_factory.mktemp("place"), texts, **SETTINGS)
    assert train(place).returncode == 0
    write_task_data(place.folder / "items")
    return place


def call(place: Workplace, tasks: str, *runs: str, data: str = "items") -> tuple[int, str]:
    folders = [str(place.run_dir(run)) for run in runs]
    done = place.here("scripts.lm_eval", *folders, "--tasks", tasks, *(["--task_data", data] if data else []))
    return done.returncode, done.stdout


def evaluated(folder: Path) -> dict[str, run_record.LaterEvaluation]:
    """Return task -> its evaluation of a run."""
    record = run_record.load(folder)
    folders = sorted((folder / "evaluations").glob("lm-eval-*"))
    found = [one for path in folders if (one := run_record.read_evaluation(path, record))]
    return {one.rows[0].dataset: one for one in found}


def found(place: Workplace, run: str) -> dict[str, dict[str, Result]]:
    """Return task -> metric -> result of a run."""
    tasks = {name: results_of(one) for name, one in evaluated(place.run_dir(run)).items()}
    return {name: {one.row.metric: one for one in results} for name, results in tasks.items()}


@pytest.fixture(scope="module")
def printed(place: Workplace) -> str:
    """Evaluate all runs on all tasks."""
    before = {path: path.read_bytes() for path in place.study.glob("runs/*/*") if path.is_file()}
    status, text = call(place, " ".join(NAMES), *RUNS)
    assert status == 0, text
    assert {path: path.read_bytes() for path in before} == before
    return text


def test_every_run_gets_every_task_with_items_errors_and_versions(place: Workplace, printed: str) -> None:
    for run in RUNS:
        tokens = run_record.load(place.run_dir(run)).progress.tokens
        assert {one.rows[0].tokens for one in evaluated(place.run_dir(run)).values()} == {tokens}
        tasks = found(place, run)
        assert sorted(tasks) == sorted(NAMES)
        for metrics in tasks.values():
            assert 0 <= metrics.pop(TRUNCATED).row.value <= 1
            metrics.pop(CHANCE, None)
            for one in metrics.values():
                assert (len(one.items), one.harness) == (one.row.items, "0.4.13"), one
                assert one.kind in ("mean", "perplexity"), one
    chances = {name: one[CHANCE].row.value for name, one in found(place, "B0").items() if CHANCE in one}
    assert chances == {"hellaswag": 0.25, "piqa": 0.5, "arc_easy": 0.25, "winogrande": 0.5}
    assert "bootstrapping" not in printed
    assert "it/s]" not in printed


def test_arms_are_paired_by_seed_and_item(place: Workplace, printed: str) -> None:
    def likelihoods(run: str) -> np.ndarray:
        one = found(place, run)["lambada_openai"]["perplexity"]
        assert math.exp(-np.mean(one.items)) == pytest.approx(one.row.value, rel=1e-6)
        return one.items

    gaps = np.stack([likelihoods(f"B{seed}") - likelihoods(f"RALEARN{seed}") for seed in (0, 1)])
    errors = [rows.std(ddof=1) / math.sqrt(rows.size) for rows in (gaps.mean(0), gaps.mean(1))]
    (line,) = [line for line in printed.splitlines() if "ln perplexity" in line]
    assert line.split()[-4:] == [f"{gaps.mean():+.4f}", *(f"{error:.4f}" for error in errors), "2"]
    assert errors[0] > 0


def test_nothing_is_repeated_unless_weights_items_or_the_file_changed(
    place: Workplace, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place.run_dir("B1") / "evaluations/lm-eval-piqa/rows.jsonl"
    first = path.read_bytes()
    note = "shift.py is the study's copy"
    assert note not in printed
    with monkeypatch.context() as patch:
        patch.setattr(
            "study.evaluation.lm_eval_model.load_run", lambda folder: replace(load_run(folder), notes=[note])
        )
        status, text = call(place, "piqa winogrande", "B1", "RALEARN1")
    assert status == 0
    assert f"RALEARN1: {note}" in text
    assert path.read_bytes() == first
    assert "B1: evaluated on nothing new; existing results of piqa, winogrande" in text
    assert "hellaswag" not in text
    other = place.folder / "other"
    shutil.copytree(place.folder / "items", other)
    (other / "piqa.jsonl").write_text((other / "piqa.jsonl").read_text().replace("loaf", "roll"))
    status, text = call(place, "piqa winogrande", "B1", data="other")
    assert "B1: evaluated on piqa; existing results of winogrande" in text
    path.write_bytes(path.read_bytes().replace(b'"acc"', b'"acd"'))
    problems = [problem for row in verify_study(place.study) for problem in row.problems]
    assert any(problem.startswith("evaluations/lm-eval-piqa: rows.jsonl: SHA-256 is") for problem in problems)
    assert call(place, " ".join(NAMES), "B1")[0] == 0
    assert not any(row.problems for row in verify_study(place.study))
    assert path.read_bytes() == first


def test_other_weights_are_evaluated_again(place: Workplace, printed: str, tmp_path: Path) -> None:
    study = tmp_path / "other/runs"
    folder = study / "B0"
    shutil.copytree(place.run_dir("B0"), folder)
    loaded = checkpoint.load_latest(folder / "checkpoint")
    assert loaded
    loaded.state["model"]["token.weight"] += 0.5
    shutil.rmtree(folder / "checkpoint")
    checkpoint.save(folder / "checkpoint", loaded.iteration, loaded.state, loaded.meta)
    done = place.here("scripts.lm_eval", str(folder), "--tasks", "piqa", "--task_data", "items")
    assert "B0: evaluated on piqa" in done.stdout
    weights = [evaluated(one)["piqa"].about["weights"] for one in (folder, place.run_dir("B0"))]
    assert weights[0] != weights[1]


def test_an_interrupted_evaluation_keeps_the_finished_tasks(
    place: Workplace, printed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from study.evaluation import lm_eval_runs as evaluate

    folder = tmp_path / "study/runs/B0"
    shutil.copytree(place.run_dir("B0"), folder)
    shutil.rmtree(folder / "evaluations")

    def interrupted(model: object, name: str, *rest: object) -> object:
        if name == "winogrande":
            raise KeyboardInterrupt
        return original(model, name, *rest)

    original = evaluate._evaluate
    monkeypatch.setattr(evaluate, "_evaluate", interrupted)
    tasks = load_tasks(("piqa", "winogrande"), place.folder / "items")
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate_run(folder, tasks)
    assert list(evaluated(folder)) == ["piqa"]


@pytest.mark.parametrize(
    ("tasks", "run", "data", "says"),
    [
        ("", "B0", "items", "TASKS names no task; fix: TASKS="),
        ("piqa", "nowhere", "items", "nowhere is not a run; fix: make lm-eval RUN="),
        ("piqa", "B0", "nowhere", "TASK_DATA=nowhere is not a folder; fix:"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    place: Workplace, tasks: str, run: str, data: str, says: str
) -> None:
    status, text = call(place, tasks, run, data=data)
    assert status != 0
    assert says in text
    assert "Traceback" not in text
