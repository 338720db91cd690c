"""What a study can see: sensitivity, the spread of the arms, tests by item and by window."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gpt2 import record
from study import evidence, power, render, report, words
from study.statistics import NoiseFloor

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
ITEMS = 400


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    keys = ("model", "data", "tokenizer", "batch", "schedule", "validation")
    return record.blank(record.run_name(name, seed), name, seed) | {
        "status": "finished",
        "fingerprint": dict.fromkeys(keys, "same") | {"initial_weights": f"seed{seed}"},
        "target": {"name": "cpu", "device": "a processor", "memory_bytes": 2**34, "dtype": "float32",
                   "attention_backend": "flash", "torch": "2.13.0", "driver": None},
        "batch": {"effective": 16, "micro": 8, "accumulation": 2, "world_size": 1, "block_size": 128},
        "progress": {"iterations": 30, "tokens": 3000, "train_seconds": 1800.0},
        "clock": {"train": 1800.0, "compile": 60.0, "evaluate": 100.0, "checkpoint": 30.0, "data": 10.0},
        "validation": {"loss": loss, "perplexity": None, "best_perplexity": None, "tokens": 4096,
                       "history": [[3000, 1800.0, loss]]},
    }  # fmt: skip


def a_study(study: Path, seeds: int = 3, variants: tuple[str, ...] = VARIANTS, items: bool = True) -> Path:
    """RALEARN is right on 40 items more than the others; its windows are better by 0.05 nats."""
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
                                      "items": ITEMS}  # fmt: skip
                record.write_json(
                    run_dir / "hellaswag.json",
                    {"choices": [], "choices_norm": [], "correct": correct, "correct_norm": correct},
                )
                windows = np.random.default_rng(9).normal(size=50) + value["validation"]["loss"]
                windows += 0.01 * draw.normal(size=50)
                kept = {"tokens": 3000, "losses": windows.tolist()}
                record.write_json(run_dir / "validation_windows.json", kept)
            record.write_json(run_dir / "run.json", value)
    return study


def read(study: Path, run: str, name: str) -> Any:
    return json.loads((study / "runs" / run / name).read_text())


def test_the_smallest_effect_is_that_of_the_verdicts_own_test(tmp_path: Path) -> None:
    made = report.build(a_study(tmp_path))
    seen = made.evidence.sensitivity
    assert seen is not None
    assert made.floor is not None
    assert (seen.seeds, seen.arms, seen.freedom) == (3, 4, 9)
    error = made.floor.sigma * math.sqrt((1 + 1 / 4) / 3)
    critical = stats.t.ppf(0.975, 9)
    ratio = seen.smallest / error
    assert stats.nct.sf(critical, 9, ratio) + stats.nct.cdf(-critical, 9, ratio) == pytest.approx(
        0.8, abs=1e-6
    )


def test_the_smallest_effect_is_that_at_the_seeds_the_variant_was_judged_at(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    (study / "runs" / "RALEARN1" / "run.json").unlink()
    made = report.build(study)
    seen, judged = made.evidence.sensitivity, made.judged[0].result.difference
    assert seen is not None
    assert judged.high is not None
    assert (seen.seeds, judged.count, seen.freedom) == (2, 2, 9)
    assert seen.noise == pytest.approx(judged.high - judged.mean)
    assert "With 2 seeds" in words.visible(seen)[0]


def test_a_run_that_was_cut_is_in_no_paired_difference(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    before = report.build(study)
    value = json.loads((study / "runs" / "RALEARN1" / "run.json").read_text())
    value["schedule"] = {"iterations": value["progress"]["iterations"], "cut": True}
    value["progress"]["tokens"] -= 1
    (study / "runs" / "RALEARN1" / "run.json").write_text(json.dumps(value))
    after = report.build(study)
    assert [row.seeds for row in before.evidence.windows if row.variant == "RALEARN"] == [[0, 1, 2]]
    assert after.cut == ["RALEARN1"]
    assert [row.seeds for row in after.evidence.windows if row.variant == "RALEARN"] == [[0, 2]]
    assert {tuple(row.seeds) for row in after.evidence.items if row.variant == "RALEARN"} == {(0, 2)}
    (row,) = [line for line in render.markdown(after).splitlines() if line.startswith("| RALEARN | 0, 1, 2")]
    assert "(2 of 3 seeds)" in row


def test_the_hours_of_more_seeds_are_those_of_the_runs_own_clocks(tmp_path: Path) -> None:
    seen = report.build(a_study(tmp_path, seeds=2)).evidence.sensitivity
    assert seen is not None
    assert seen.seed_hours == pytest.approx(5 * 2000 / 3600)
    design = power.against_arms(report.build(tmp_path).floor.sigma, 4)  # type: ignore[union-attr]
    assert design is not None
    for plan in seen.planned:
        assert plan.effect == pytest.approx(math.log1p(plan.percent / 100))
        assert plan.seeds == design.seeds_for(plan.effect)
        assert plan.seeds is not None
        assert plan.more == max(0, plan.seeds - 2)
        assert plan.hours == pytest.approx(plan.more * 5 * 2000 / 3600)


def test_the_seeds_needed_are_said_with_their_hours() -> None:
    planned = [evidence.Planned(0.5, 0.005, None, None, None), evidence.Planned(1.0, 0.01, 7, 4, 9.0),
               evidence.Planned(2.0, 0.02, 3, 0, 0.0), evidence.Planned(5.0, 0.05, 1, 0, 0.0)]  # fmt: skip
    line = words.visible(evidence.Sensitivity(3, 4, 9, 0.008, 0.012, 2.25, planned))[1]
    assert line == (
        "To see 0.5 % you need more than 1,000 seeds; to see 1 % you need 7 seeds (4 more, about 9.0 hours); "
        "for 2 % and more the seeds at hand suffice."
    )


def test_without_a_noise_floor_nothing_is_said_of_what_can_be_seen(tmp_path: Path) -> None:
    made = report.build(a_study(tmp_path, variants=("B", "RALEARN")))
    assert made.evidence.sensitivity is None
    assert evidence.sensitivity([4, 4], NoiseFloor(0.0, 6), 1.0) is None
    assert "What this study can see is not known" in render.markdown(made)
    assert "Too little data" in render.markdown(made)


def test_half_swapped_arms_are_compared_with_fully_swapped_ones_and_not_assumed_alike() -> None:
    draw = np.random.default_rng(3)
    sizes = {"B": 0.001, "RAALL": 0.001, "RAEARLY": 0.02, "RALATE": 0.02, "RAALT": 0.02, "RALEARN": 5.0}
    shift = draw.normal(size=6)
    final = {
        name: {seed: float(4 + shift[seed] + size * draw.normal()) for seed in range(6)}
        for name, size in sizes.items()
    }
    seen = evidence.spread(final)
    half = np.array([[final[name][seed] for name in evidence.HALF] for seed in range(6)])
    full = np.array([[final[name][seed] for name in evidence.FULL] for seed in range(6)])
    ratio = half.var(axis=1, ddof=1).mean() / full.var(axis=1, ddof=1).mean()
    assert seen.test is not None
    assert seen.enough
    assert seen.test.freedom == (12, 6)
    assert seen.test.ratio == pytest.approx(ratio)
    assert seen.test.p_value == pytest.approx(2 * stats.f.sf(ratio, 12, 6), rel=1e-6)
    assert "They differ: variance ratio" in words.alike(seen)


def test_one_seed_is_too_little_data_to_compare_variances(tmp_path: Path) -> None:
    seen = report.build(a_study(tmp_path, seeds=1)).evidence.spread
    assert not seen.enough
    assert "Too little data (1 and 1 degrees of freedom)." in words.alike(seen)


def test_items_of_one_seed_get_mcnemars_exact_test(tmp_path: Path) -> None:
    tests = report.build(a_study(tmp_path, seeds=1)).evidence.items
    seen = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc"))
    own, base = (np.array(read(tmp_path, run, "hellaswag.json")["correct"]) for run in ("RALEARN0", "B0"))
    wins, losses = int((own & ~base).sum()), int((base & ~own).sum())
    assert (seen.wins, seen.losses, seen.items) == (wins, losses, ITEMS)
    assert seen.p_value == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert seen.adjusted_p >= seen.p_value


def test_items_of_several_seeds_are_counted_once_by_their_net_score(tmp_path: Path) -> None:
    tests = report.build(a_study(tmp_path)).evidence.items
    seen = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc_norm"))
    net = sum(
        np.array(read(tmp_path, f"RALEARN{seed}", "hellaswag.json")["correct_norm"]).astype(int)
        - np.array(read(tmp_path, f"B{seed}", "hellaswag.json")["correct_norm"]).astype(int)
        for seed in range(3)
    )
    assert (seen.wins, seen.losses) == (int((net > 0).sum()), int((net < 0).sum()))
    assert seen.seeds == [0, 1, 2]


def test_windows_are_paired_and_labelled_as_without_seed_noise(tmp_path: Path) -> None:
    made = report.build(a_study(tmp_path))
    seen = next(row for row in made.evidence.windows if row.variant == "RALEARN")
    differences = np.mean([
        np.array(read(tmp_path, f"RALEARN{seed}", "validation_windows.json")["losses"])
        - np.array(read(tmp_path, f"B{seed}", "validation_windows.json")["losses"])
        for seed in range(3)
    ], axis=0)  # fmt: skip
    low, high = stats.t.interval(0.95, 49, loc=differences.mean(), scale=stats.sem(differences))
    assert (seen.windows, seen.difference.mean) == (50, pytest.approx(differences.mean()))
    assert (seen.difference.low, seen.difference.high) == (pytest.approx(low), pytest.approx(high))
    assert "**no seed noise**" in render.markdown(made)


def test_side_files_that_are_missing_torn_or_of_another_evaluation_are_left_out(tmp_path: Path) -> None:
    assert report.build(a_study(tmp_path / "without", items=False)).evidence.items == []
    study = a_study(tmp_path / "with", seeds=1)
    (study / "runs" / "RAEARLY0" / "hellaswag.json").write_text("[")
    (study / "runs" / "RALATE0" / "hellaswag.json").write_text('{"choices": [1], "choices_norm": [1]}')
    other = read(study, "RAALL0", "hellaswag.json")
    other["correct"][:50] = [True] * 50
    record.write_json(study / "runs" / "RAALL0" / "hellaswag.json", other)
    windows = read(study, "RALEARN0", "validation_windows.json") | {"tokens": 2000}
    record.write_json(study / "runs" / "RALEARN0" / "validation_windows.json", windows)
    torn = {"tokens": 3000, "losses": [1.0, None]}
    record.write_json(study / "runs" / "RAALL0" / "validation_windows.json", torn)
    found = report.build(study).evidence
    assert {test.variant for test in found.items if test.measure == "acc"} == {"RALEARN"}
    assert {test.variant for test in found.items if test.measure == "acc_norm"} == {"RAALL", "RALEARN"}
    assert {row.variant for row in found.windows} == {"RAEARLY", "RALATE"}


def test_one_seed_ranks_nothing_and_is_judged_by_the_measured_floor(tmp_path: Path) -> None:
    made = report.build(a_study(tmp_path, seeds=1))
    text = render.markdown(made)
    assert [judged.variant for judged in made.judged] == ["RALEARN"]
    assert "no ranking is given" in text
    assert "With one seed a real change of" in text


def test_report_json_holds_the_evidence(tmp_path: Path) -> None:
    made = report.write(a_study(tmp_path))
    seen = json.loads((tmp_path / "report.json").read_text())["evidence"]
    assert made.evidence.sensitivity is not None
    assert seen["sensitivity"]["smallest"] == made.evidence.sensitivity.smallest
    assert seen["spread"]["enough"] is True
    assert len(seen["items"]) == 8
    assert len(seen["windows"]) == 4
