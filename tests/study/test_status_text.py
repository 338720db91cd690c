"""The seconds of a run before one is finished, and the line of a finished one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from runtime import files
from runtime.settings import EvaluationConfig
from study import plan_file
from study.terminal import START_SECONDS, expected_seconds, final_share, outcome
from tests.study.sample_records import a_plan, a_record


def test_an_expected_run_has_its_start_and_all_its_evaluations(tmp_path: Path) -> None:
    """Evaluations during training and at the end, and the items of the continuation choice."""
    classes = {name: {"seconds_per_iteration": 0.1} for name in ("standard", "learned")}
    files.write_json(tmp_path / "plan.json", a_plan(classes=classes))
    plan = plan_file.read(tmp_path)
    assert plan is not None
    tokens = next(iter(plan.variants.values())).tokens
    during = EvaluationConfig(tokens // 10, tokens // 2, False, None, 0)
    at_end = dataclasses.replace(during, interval_tokens=0)
    train = expected_seconds(plan, dataclasses.replace(at_end, tokens=0))
    assert train is not None
    several, last = expected_seconds(plan, during), expected_seconds(plan, at_end)
    assert several is not None
    assert last is not None
    assert several - last == pytest.approx(last - train, rel=0.01)
    assert final_share(plan, dataclasses.replace(at_end, hellaswag=True)) > final_share(plan, at_end)
    assert train > START_SECONDS


SCORE = {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005, "items": 9}
MEASURED = "157.3M tokens in 50m 00s of training  52,429 tok/s  1.00 GiB"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "failed", "error": "no free memory"}, "failed: no free memory"),
        ({}, f"perplexity 54.60  {MEASURED}"),
        ({"hellaswag": SCORE}, f"perplexity 54.60  HellaSwag 30.0% +- 0.5%  {MEASURED}"),
    ],
)
def test_the_line_of_an_ended_run_has_its_results_or_its_error(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    files.write_json(tmp_path / "run.json", a_record("B", 0, 4.0) | changes)
    assert outcome(tmp_path) == expected
