"""Paired tests by HellaSwag item."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runtime import run_record
from study.report import report_data as build
from tests.checked_files import write_checked, write_right
from tests.study.sample_records import STEPS, UPDATE, VARIANTS, a_record

ITEMS = 400


def a_study(study: Path, seeds: int = 3, variants: tuple[str, ...] = VARIANTS, items: bool = True) -> Path:
    """RALEARN is right on 40 items more than the others."""
    draw = np.random.default_rng(0)
    for seed in range(seeds):
        base = 4.0 + 0.02 * float(draw.normal())
        for name in variants:
            better = name == "RALEARN"
            value = a_record(name, seed, base + 0.004 * float(draw.normal()) - 0.05 * better)
            run_dir = study / "runs" / value["run"]
            run_dir.mkdir(parents=True)
            if items:
                correct = draw.permutation(np.arange(ITEMS) < 120 + 40 * better).tolist()
                rate = sum(correct) / ITEMS
                error = math.sqrt(rate * (1 - rate) / (ITEMS - 1))
                value["hellaswag"] = {"acc": rate, "acc_stderr": error, "acc_norm": rate, "acc_norm_stderr": error,
                                      "items": ITEMS, "items_sha256": "f" * 64}  # fmt: skip
                write_right(run_dir, "hellaswag", correct)
            write_checked(run_dir / "run.json", value)
    return study


def right(study: Path, run: str) -> Any:
    return np.load(study / "runs" / run / "items/acc_norm-hellaswag.npy")


def test_items_of_one_seed_get_mcnemars_exact_test(tmp_path: Path) -> None:
    tests = build.build_report(a_study(tmp_path, seeds=1)).items
    found = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc"))
    values, base = (right(tmp_path, run) for run in ("RALEARN0", "B0"))
    wins, losses = int((values & ~base).sum()), int((base & ~values).sum())
    assert (found.wins, found.losses, found.items) == (wins, losses, ITEMS)
    assert found.p_value == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert found.adjusted_p >= found.p_value


def test_items_of_several_seeds_are_counted_once_by_their_net_score(tmp_path: Path) -> None:
    tests = build.build_report(a_study(tmp_path)).items
    found = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc_norm"))
    net = sum(
        right(tmp_path, f"RALEARN{seed}").astype(int) - right(tmp_path, f"B{seed}").astype(int)
        for seed in range(3)
    )
    assert (found.wins, found.losses) == (int((net > 0).sum()), int((net < 0).sum()))
    assert found.seeds == [0, 1, 2]


def test_a_run_with_damaged_values_of_items_is_excluded(tmp_path: Path) -> None:
    assert build.build_report(a_study(tmp_path / "without", items=False)).items == []
    study = a_study(tmp_path / "with", seeds=1)
    (study / "runs" / "RAEARLY0" / "items/acc-hellaswag.npy").write_text("[")
    (study / "runs" / "RALATE0" / "items/acc_norm-hellaswag.npy").unlink()
    found = build.build_report(study).items
    assert {test.variant for test in found} == {"RAALL", "RALEARN"}


def test_a_truncated_run_is_in_no_item_test(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    value = run_record.load(study / "runs" / "RALEARN1").to_json()
    value["schedule"] = {"iterations": value["progress"]["iterations"], "cut": True}
    tokens = (STEPS - 1) * UPDATE
    value["progress"] |= {"iterations": STEPS - 1, "tokens": tokens}
    value["validation"]["history"][-1][0] = tokens
    write_checked(study / "runs" / "RALEARN1" / "run.json", value)
    report = build.build_report(study)
    assert report.cut == ["RALEARN1"]
    assert {tuple(test.seeds) for test in report.items if test.variant == "RALEARN"} == {(0, 2)}


def test_a_file_with_another_number_of_items_is_skipped(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    folder = study / "runs" / "RALEARN0"
    write_right(folder, "hellaswag", [True] * ITEMS * 2)
    run_record.write(folder, run_record.load(folder))
    assert not [test for test in build.build_report(study).items if test.variant == "RALEARN"]
