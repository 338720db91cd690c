"""plan.json is read into dataclasses and written from them without loss; an unreadable plan is an error of one line."""

import json
from pathlib import Path

import pytest

from referee.verdict.design import Design
from runtime import records
from runtime.batch_plan import BatchPlan
from runtime.run_record import RecordedTarget
from study import plan_file
from study.plan_file import CostClass, Plan, PlanBudget, PlanFileError, PlanRow, StepTimeRatio

PLAN = Plan(
    batch=BatchPlan(4, 2, 2, 1, 16),
    budget=PlanBudget(60, 0, 0, 90, True),
    variants={
        "B": PlanRow("standard", 100, 6400, 1000, 5),
        "RALEARN": PlanRow("learned-output", 90, 5760),
    },
    classes={"standard": CostClass(0.5, (0.4, 0.6), 10), "learned-output": CostClass(0.55, (0.55,))},
    step_time_ratios={"learned-output": StepTimeRatio("standard", 1.1, 1.05, 1.15)},
    notes=("a note",),
    design=Design(("B",), ("RALEARN",), "RALEARN", (0, 1, 2), (3,), 0.01).hashed,
    added={"GATED": 6},
    later_looks=(6,),
    study="s",
    created="2026-11-22T00:00:00+00:00",
    config_sha256="0" * 64,
    target=RecordedTarget("cpu", "a processor", 2**34, "float32", "flash", "2.13.0", None),
)


def test_a_written_plan_is_read_unchanged(tmp_path: Path) -> None:
    assert plan_file.read(tmp_path) is None
    plan_file.write(tmp_path, PLAN)
    assert plan_file.read(tmp_path) == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == 1


def test_planned_seconds_are_the_steps_of_the_class() -> None:
    assert PLAN.planned_seconds("B") == 50.0
    untimed = plan_file.from_json(PLAN.to_json() | {"classes": {}})
    assert untimed.planned_seconds("B") is None


def test_an_unreadable_plan_is_an_error_of_one_line_with_file_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    records.write(path, {})
    with pytest.raises(PlanFileError) as caught:
        plan_file.read(tmp_path)
    assert str(caught.value).startswith(f"{path} cannot be read: plan: ")
    assert "fix: restore it from a copy" in str(caught.value)
    assert "\n" not in str(caught.value)
