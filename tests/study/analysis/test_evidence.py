"""What a study can see: sensitivity, the spread of the arms, tests by item and by window."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gpt2.artifacts import run_record
from gpt2.system import files
from study.analysis import evidence
from study.report import build, markdown, sentences, write
from study.stats import power
from study.stats.statistics import NoiseFloor, against_floor

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
ITEMS = 400


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    keys = ("model", "data", "tokenizer", "batch", "schedule", "validation")
    return run_record.blank(run_record.run_name(name, seed), name, seed) | {
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
                files.write_json(
                    run_dir / "hellaswag.json",
                    {"choices": [], "choices_norm": [], "correct": correct, "correct_norm": correct},
                )
                windows = np.random.default_rng(9).normal(size=50) + value["validation"]["loss"]
                windows += 0.01 * draw.normal(size=50)
                kept = {"tokens": 3000, "losses": windows.tolist()}
                files.write_json(run_dir / "validation_windows.json", kept)
            files.write_json(run_dir / "run.json", value)
    return study


def read(study: Path, run: str, name: str) -> Any:
    return json.loads((study / "runs" / run / name).read_text())


def test_the_smallest_effect_is_that_of_the_verdicts_own_test(tmp_path: Path) -> None:
    made = build.build_report(a_study(tmp_path))
    seen = made.evidence.sensitivity
    assert seen is not None
    assert made.floor is not None
    assert (seen.seeds, seen.arms, seen.dof) == (3, 4, 9)
    error = made.floor.sigma * math.sqrt((1 + 1 / 4) / 3)
    critical = stats.t.ppf(0.975, 9)
    ratio = seen.smallest / error
    assert stats.nct.sf(critical, 9, ratio) + stats.nct.cdf(-critical, 9, ratio) == pytest.approx(
        0.8, abs=1e-6
    )


def test_the_smallest_effect_is_that_at_the_seeds_the_variant_was_judged_at(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    (study / "runs" / "RALEARN1" / "run.json").unlink()
    made = build.build_report(study)
    seen, judged = made.evidence.sensitivity, made.judged[0].result.difference
    assert seen is not None
    assert judged.high is not None
    assert (seen.seeds, judged.count, seen.dof) == (2, 2, 9)
    assert seen.noise == pytest.approx(judged.high - judged.mean)
    assert "With 2 seeds" in sentences.visible(seen)[0]


def test_a_run_that_was_cut_is_in_no_paired_difference(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    before = build.build_report(study)
    value = json.loads((study / "runs" / "RALEARN1" / "run.json").read_text())
    value["schedule"] = {"iterations": value["progress"]["iterations"], "cut": True}
    value["progress"]["tokens"] -= 1
    (study / "runs" / "RALEARN1" / "run.json").write_text(json.dumps(value))
    after = build.build_report(study)
    assert [row.seeds for row in before.evidence.windows if row.variant == "RALEARN"] == [[0, 1, 2]]
    assert after.cut == ["RALEARN1"]
    assert [row.seeds for row in after.evidence.windows if row.variant == "RALEARN"] == [[0, 2]]
    assert {tuple(row.seeds) for row in after.evidence.items if row.variant == "RALEARN"} == {(0, 2)}
    (row,) = [
        line for line in markdown.markdown(after).splitlines() if line.startswith("| RALEARN | 0, 1, 2")
    ]
    assert "(2 of 3 seeds)" in row


def test_the_hours_of_more_seeds_are_those_of_the_runs_own_clocks(tmp_path: Path) -> None:
    seen = build.build_report(a_study(tmp_path, seeds=2)).evidence.sensitivity
    assert seen is not None
    assert seen.seed_hours == pytest.approx(5 * 2000 / 3600)
    design = power.against_arms(build.build_report(tmp_path).floor.sigma, [4, 4], 6)  # type: ignore[union-attr]
    assert design is not None
    for plan in seen.planned:
        assert plan.effect == pytest.approx(math.log1p(plan.percent / 100))
        assert plan.seeds is not None
        assert plan.seeds == max(2, power.seeds_for([design], plan.effect) or 0)
        assert plan.more == max(0, plan.seeds - 2)
        assert plan.hours == pytest.approx(plan.more * 5 * 2000 / 3600)


@pytest.mark.parametrize("wider", [None, ("RALEARN", 0.03)])
@pytest.mark.parametrize("percent", evidence.PERCENT)
def test_what_more_seeds_see_begins_where_the_seeds_at_hand_end(
    wider: tuple[str, float] | None, percent: float
) -> None:
    """Also where the floor knows more seeds than the comparison has, so that its degrees of freedom are more."""
    for dof in (9, 12):
        seen = evidence.sensitivity([4, 4, 4], NoiseFloor(0.004, dof), 1.0, wider)
        assert seen is not None
        (plan,) = [plan for plan in seen.planned if plan.percent == percent]
        assert plan.seeds is not None
        assert (plan.more == 0) == (seen.smallest <= plan.effect)


def test_a_variant_that_varies_more_has_to_show_an_effect_by_its_own_spread() -> None:
    seen = evidence.sensitivity([4, 4, 4], NoiseFloor(0.004, 9), 1.0, ("RALEARN", 0.03))
    assert seen is not None
    error = 0.03 / math.sqrt(3)
    critical, ratio = stats.t.ppf(0.975, 2), seen.smallest / error
    assert stats.nct.sf(critical, 2, ratio) + stats.nct.cdf(-critical, 2, ratio) == pytest.approx(
        0.8, abs=1e-6
    )
    said = sentences.visible(seen)[0]
    assert "by the spread of RALEARN's own runs, which vary more than the arms', 2 degrees of freedom" in said


def test_what_is_called_visible_is_found_by_the_verdicts_rule_of_a_variant_that_varies_more() -> None:
    """2,000 studies of 5 seeds: a variant three times as noisy as the arms, at the effect that is called visible."""
    draw, arms_noise, own_noise, found = np.random.default_rng(4), 0.004, 0.012, 0
    spread = math.hypot(own_noise, arms_noise / 2)
    seen = evidence.sensitivity([4] * 5, NoiseFloor(arms_noise, 15), None, ("RALEARN", spread))
    assert seen is not None
    for _ in range(2000):
        arms = arms_noise * draw.normal(size=(5, 4))
        own = seen.smallest + own_noise * draw.normal(size=5)
        result = against_floor(list(zip(own.tolist(), arms.tolist(), strict=True)))
        assert result is not None
        found += build.Judged("RALEARN", result, result.p_value, 1).beyond_noise
    assert 0.76 <= found / 2000 <= 0.86  # a little more: not every such study notices that it varies more


def test_the_seeds_needed_are_said_with_their_hours() -> None:
    planned = [evidence.Planned(0.5, 0.005, None, None, None), evidence.Planned(1.0, 0.01, 7, 4, 9.0),
               evidence.Planned(2.0, 0.02, 3, 0, 0.0), evidence.Planned(5.0, 0.05, 1, 0, 0.0)]  # fmt: skip
    line = sentences.visible(evidence.Sensitivity(3, 4, 9, 0.008, 0.012, 2.25, planned))[1]
    assert line == (
        "To see 0.5 % you need more than 1,000 seeds; to see 1 % you need 7 seeds (4 more, about 9.0 hours); "
        "for 2 % and more the seeds at hand suffice."
    )


def test_without_a_noise_floor_nothing_is_said_of_what_can_be_seen(tmp_path: Path) -> None:
    made = build.build_report(a_study(tmp_path, variants=("B", "RALEARN")))
    assert made.evidence.sensitivity is None
    assert evidence.sensitivity([4, 4], NoiseFloor(0.0, 6), 1.0) is None
    assert "What this study can see is not known" in markdown.markdown(made)
    assert "Too little data" in markdown.markdown(made)


def square(halves: float, together: float, seeds: int) -> dict[str, dict[int, float]]:
    """Losses of the four arms: a shift a seed, what each half does alone, and what only both do together."""
    draw = np.random.default_rng(3)
    signs = {"B": (-1, -1), "RAEARLY": (1, -1), "RALATE": (-1, 1), "RAALL": (1, 1)}
    drawn = draw.normal(size=(seeds, 4)) * (1, halves / 2, halves / 2, together / 2)
    return {
        name: {s: 4 + float(drawn[s] @ (1, a, b, a * b)) for s in range(seeds)}
        for name, (a, b) in signs.items()
    }


def test_arms_that_only_add_up_are_told_from_arms_that_vary_alike() -> None:
    """Then a half swap has half the variance of a full one; the pairs of opposites do not show it."""
    seen = evidence.spread(square(0.02, 0.001, 6))
    assert seen.test is not None
    assert seen.enough
    assert seen.test.dof == (12, 6)
    assert seen.test.p_value < 1e-4
    assert "They differ: variance" in sentences.alike(seen)
    alike = sentences.alike(evidence.spread(square(0.02, 0.02, 6)))
    low, high = stats.f.ppf(0.025, 12, 6), stats.f.ppf(0.975, 12, 6)
    assert f"ratios from {low:.2g} to {high:.2g} cannot be told from 1" in alike


def test_the_contrasts_of_the_arms_are_what_a_regression_finds() -> None:
    draw = np.random.default_rng(5)
    final = {name: {s: float(4 + draw.normal()) for s in range(5)} for name in evidence.SQUARE}
    design = np.array([[1, -1, -1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, 1, 1, 1]]) / 2  # orthonormal
    found = np.array([np.linalg.solve(design, [final[n][s] for n in evidence.SQUARE]) for s in range(5)])
    seen = evidence.spread(final)
    assert seen.halves is not None
    assert seen.together is not None
    assert seen.halves.sigma**2 == pytest.approx((found[:, 1:3] ** 2).mean())
    assert seen.together.sigma**2 == pytest.approx((found[:, 3] ** 2).mean())
    assert (seen.halves.dof, seen.together.dof) == (10, 5)
    final["RAALL"].pop(2)
    fewer = evidence.spread(final)
    assert fewer.together is not None
    assert fewer.together.dof == 4


def test_independent_arms_are_called_different_in_one_study_of_twenty() -> None:
    draw, found = np.random.default_rng(8), 0
    for _ in range(2000):
        losses = draw.normal(size=(4, 4)).tolist()
        final = {name: dict(enumerate(own)) for name, own in zip(evidence.SQUARE, losses, strict=True)}
        found += sentences.differs(evidence.spread(final))
    assert 0.03 <= found / 2000 <= 0.07


def test_one_seed_is_too_little_data_to_compare_variances(tmp_path: Path) -> None:
    seen = build.build_report(a_study(tmp_path, seeds=1)).evidence.spread
    assert not seen.enough
    assert "Too little data (2 and 1 degrees of freedom)." in sentences.alike(seen)


def test_items_of_one_seed_get_mcnemars_exact_test(tmp_path: Path) -> None:
    tests = build.build_report(a_study(tmp_path, seeds=1)).evidence.items
    seen = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc"))
    own, base = (np.array(read(tmp_path, run, "hellaswag.json")["correct"]) for run in ("RALEARN0", "B0"))
    wins, losses = int((own & ~base).sum()), int((base & ~own).sum())
    assert (seen.wins, seen.losses, seen.items) == (wins, losses, ITEMS)
    assert seen.p_value == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert seen.adjusted_p >= seen.p_value


def test_items_of_several_seeds_are_counted_once_by_their_net_score(tmp_path: Path) -> None:
    tests = build.build_report(a_study(tmp_path)).evidence.items
    seen = next(test for test in tests if (test.variant, test.measure) == ("RALEARN", "acc_norm"))
    net = sum(
        np.array(read(tmp_path, f"RALEARN{seed}", "hellaswag.json")["correct_norm"]).astype(int)
        - np.array(read(tmp_path, f"B{seed}", "hellaswag.json")["correct_norm"]).astype(int)
        for seed in range(3)
    )
    assert (seen.wins, seen.losses) == (int((net > 0).sum()), int((net < 0).sum()))
    assert seen.seeds == [0, 1, 2]


def test_windows_are_paired_and_labelled_as_without_seed_noise(tmp_path: Path) -> None:
    made = build.build_report(a_study(tmp_path))
    seen = next(row for row in made.evidence.windows if row.variant == "RALEARN")
    differences = np.mean([
        np.array(read(tmp_path, f"RALEARN{seed}", "validation_windows.json")["losses"])
        - np.array(read(tmp_path, f"B{seed}", "validation_windows.json")["losses"])
        for seed in range(3)
    ], axis=0)  # fmt: skip
    low, high = stats.t.interval(0.95, 49, loc=differences.mean(), scale=stats.sem(differences))
    assert (seen.windows, seen.difference.mean) == (50, pytest.approx(differences.mean()))
    assert (seen.difference.low, seen.difference.high) == (pytest.approx(low), pytest.approx(high))
    assert "**no seed noise**" in markdown.markdown(made)


def test_side_files_that_are_missing_torn_or_of_another_evaluation_are_left_out(tmp_path: Path) -> None:
    assert build.build_report(a_study(tmp_path / "without", items=False)).evidence.items == []
    study = a_study(tmp_path / "with", seeds=1)
    (study / "runs" / "RAEARLY0" / "hellaswag.json").write_text("[")
    (study / "runs" / "RALATE0" / "hellaswag.json").write_text('{"choices": [1], "choices_norm": [1]}')
    other = read(study, "RAALL0", "hellaswag.json")
    other["correct"][:50] = [True] * 50
    files.write_json(study / "runs" / "RAALL0" / "hellaswag.json", other)
    windows = read(study, "RALEARN0", "validation_windows.json") | {"tokens": 2000}
    files.write_json(study / "runs" / "RALEARN0" / "validation_windows.json", windows)
    torn = {"tokens": 3000, "losses": [1.0, None]}
    files.write_json(study / "runs" / "RAALL0" / "validation_windows.json", torn)
    found = build.build_report(study).evidence
    assert {test.variant for test in found.items if test.measure == "acc"} == {"RALEARN"}
    assert {test.variant for test in found.items if test.measure == "acc_norm"} == {"RAALL", "RALEARN"}
    assert {row.variant for row in found.windows} == {"RAEARLY", "RALATE"}


def test_one_seed_ranks_nothing_and_is_judged_by_the_measured_floor(tmp_path: Path) -> None:
    made = build.build_report(a_study(tmp_path, seeds=1))
    text = markdown.markdown(made)
    assert [judged.variant for judged in made.judged] == ["RALEARN"]
    assert "no ranking is given" in text
    assert "With one seed a real change of" in text


def test_report_json_holds_the_evidence(tmp_path: Path) -> None:
    made = write.write_report(a_study(tmp_path))
    seen = json.loads((tmp_path / "report.json").read_text())["evidence"]
    assert made.evidence.sensitivity is not None
    assert seen["sensitivity"]["smallest"] == made.evidence.sensitivity.smallest
    assert seen["spread"]["enough"] is True
    assert len(seen["items"]) == 8
    assert len(seen["windows"]) == 4
