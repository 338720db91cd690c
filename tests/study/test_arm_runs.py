"""Runs of arms: their recipe applies, they compare with the study's other runs, and they resume to the same numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gpt2.trainer import TrainingRun
from ra.arms import published_variants
from ra.variants import variant
from referee.pages.document import render_markdown
from runtime import run_record
from study.curves import scalars
from study.planner import recipe_note
from study.report.report_data import build_report
from study.report.report_page import report_document
from study.runs import read_runs
from tests import small_runs
from tests.small_runs import StopAfter, same

ARMS = ("B", "B+LR=2e-3", "RALEARN+WIDTH=flops:GATED", "GATED+WD=0+WARMUP=0.5")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return small_runs.write_texts(tmp_path / "texts")


def start(
    study: Path, texts: Path, name: str, stop: StopAfter | None = None, iterations: int = 4
) -> TrainingRun:
    folder = study / "runs" / run_record.run_name(name, 0)
    return small_runs.start(folder, small_runs.configuration(texts, iterations), name, stop)


def test_arms_of_one_study_share_the_fingerprint_and_are_all_counted(tmp_path: Path, texts: Path) -> None:
    for name in ARMS:
        assert start(tmp_path, texts, name).train() == "finished"
    runs = read_runs(tmp_path)
    assert [run.variant for run in runs if run.used] == [
        "B",
        "B+LR=2e-3",
        "RALEARN+WIDTH=flops:GATED",
        ARMS[3],
    ]
    assert len({json.dumps(run.record.fingerprint.to_json(), sort_keys=True) for run in runs}) == 1
    report = build_report(tmp_path)
    controls = ["B", "B+LR=2e-3"]
    assert [row.variant for row in report.rows if row.control] == controls
    assert [verdict.variant for verdict in report.verdicts] == [arm for arm in ARMS if arm not in controls]


def test_the_recipe_of_an_arm_is_that_of_its_optimizer(tmp_path: Path, texts: Path) -> None:
    plain, faster = (start(tmp_path, texts, name) for name in ("B", "B+LR=2e-3"))
    assert [run.stepper.settings.learning_rate for run in (plain, faster)] == [
        plain.config.optimizer.learning_rate,
        2e-3,
    ]
    other = start(tmp_path, texts, "GATED+WD=0+WARMUP=0.5")
    assert other.stepper.settings.warmup_fraction == 0.5
    assert {group["weight_decay"] for group in other.stepper.optimizer.param_groups} == {0.0}


@pytest.mark.parametrize("name", ["B+NORM=rms+MLP=swiglu+POSITION=rotary", *published_variants()])
def test_every_arm_trains_and_its_loss_falls(tmp_path: Path, texts: Path, name: str) -> None:
    run = start(tmp_path, texts, name, iterations=16)
    assert run.train() == "finished"
    first, *_, last = run.evaluator.losses
    assert last[2] < first[2] - 0.3
    chance = math.log(run.config.model.vocabulary)
    assert first[2] < chance + 0.5


@pytest.mark.parametrize(
    "name", [*ARMS[1:], "RALEARN+POSITION=rotary", "VALUERES+NORM=rms", "LENS+MLP=swiglu"]
)
def test_a_stopped_run_of_an_arm_resumes_to_the_same_numbers(tmp_path: Path, texts: Path, name: str) -> None:
    assert start(tmp_path / "whole", texts, name).train() == "finished"
    assert start(tmp_path / "parts", texts, name, StopAfter(3)).train() == "interrupted"
    assert start(tmp_path / "parts", texts, name).train() == "finished"
    folder = Path("runs") / run_record.run_name(name, 0)
    assert same(*(small_runs.outcome(tmp_path / kind / folder) for kind in ("whole", "parts")))


def test_learned_scalars_are_recorded_at_each_evaluation_and_are_in_the_report(
    tmp_path: Path, texts: Path
) -> None:
    for name in ("B", "LENS", "VALUERES"):
        assert start(tmp_path, texts, name, iterations=8).train() == "finished"
    plain, lens, residual = (
        run_record.load(tmp_path / "runs" / f"{name}0") for name in ("B", "LENS", "VALUERES")
    )
    assert plain.scalars is None
    assert lens.learned is None
    assert residual.scalars is not None
    tokens = [row.tokens for row in plain.validation.history]
    assert [(point.tokens, point.name) for point in residual.scalars] == [
        (at, name) for at in tokens for name in ("lambda_1", "lambda_2")
    ]
    assert {len(point.values) for point in residual.scalars} == {1}  # the first layer has none
    assert {len(point.values) for point in lens.scalars} == {2}
    found = {
        (each.variant, each.name): each for each in scalars([run for run in read_runs(tmp_path) if run.used])
    }
    assert len(found) == 5
    mixed = found["VALUERES", "lambda_1"]
    assert mixed.last == [residual.scalars[-2].values[0]] != mixed.first
    shares = [found["LENS", name].last[1] for name in ("w_std", "w_rec", "w_disc")]
    assert sum(shares) == pytest.approx(1)
    text = render_markdown(report_document(build_report(tmp_path), tmp_path))
    assert f"{mixed.first[0]:.3f}" in text
    assert "Other learned scalars" in text


def test_the_plan_names_the_settings_of_a_recipe(texts: Path) -> None:
    config = small_runs.configuration(texts, 4)
    chosen = variant("B+LR=2e-3+WD=0", config.model, small_runs.ALTERNATION)
    decay = config.optimizer.weight_decay
    assert recipe_note(chosen, config) == f"B+LR=2e-3+WD=0 has weight_decay 0 (the study: {decay:g})"
    assert recipe_note(variant("B", config.model, small_runs.ALTERNATION), config) == ""
