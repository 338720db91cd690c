"""Verdicts where training was not equal: in seconds at the end of a budget, in schedules at equal tokens."""

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2.artifacts import run_record
from gpt2.system import files
from study.analysis.allowance import EQUAL, by_schedule
from study.compare import build as compare
from study.compare import markdown as compare_render
from study.compare.ranking import rank
from study.records.runs import losses, read_runs
from study.report import build as report
from study.report import figures_final, figures_ranking
from study.report import markdown as render
from study.report import page as html_report
from study.report.build import Report
from study.stats.statistics import t_p_value, what_is_left
from tests.study.sample_records import STEPS, UPDATE, VARIANTS, a_study, edit

SECONDS = 10 * STEPS  # that the runs of a study trained for
ARMS = VARIANTS[:-1]


def built(study: Path, **budget: Any) -> Report:
    plan = {"budget": {"max_time_seconds": SECONDS} | budget, "notes": []}
    files.write_json(study / "plan.json", plan)
    return report.build_report(study)


def flat(text: str) -> str:
    return " ".join(text.split())


def pages(made: Report, study: Path) -> tuple[str, str, str]:
    """The report in Markdown, on the terminal and as a page."""
    page = html.unescape(re.sub("<[^>]*>", "", html_report.document(made, study)))
    return flat(render.markdown(made)), flat(render.terminal(made)), flat(page)


def history(study: Path, run: str) -> Any:
    return np.array(run_record.load(study / "runs" / run)["validation"]["history"]).T


def bend(study: Path, runs: Sequence[str], curve: Any) -> None:
    """Give the runs the losses `curve`(share of STEPS' tokens) at their evaluations."""
    for run in runs:
        rows = [
            [tokens, s, curve(tokens / UPDATE / STEPS)] for tokens, s, _ in history(study, run).T.tolist()
        ]
        edit(study, run, validation={"loss": rows[-1][2], "history": rows})


def slope(study: Path, runs: Sequence[str]) -> float:
    """Twice the steepest fall a unit of ln(tokens) to the end, in the second half of the tokens, by numpy's means."""
    found = []
    for run in runs:
        tokens, _, loss = history(study, run)
        ln = np.log(tokens / tokens[-1])
        later = (ln > -np.log(2)) & (ln <= np.log(0.9))
        half = (np.interp(-np.log(2), ln, loss) - loss[-1]) / np.log(2)
        found.append(2 * max(half, *((loss[later] - loss[-1]) / -ln[later])))
    return float(np.mean(found))


def all_runs(names: Sequence[str]) -> list[str]:
    return [f"{name}{seed}" for name in names for seed in range(3)]


# -- seconds at the end of a budget ------------------------------------------------------------------------------


@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize("effect", [-0.3, -0.2, -0.1, -0.03, 0.03, 0.1, 0.2, 0.3])
def test_what_unequal_time_may_be_worth_is_given_to_the_side_that_had_less(
    tmp_path: Path, effect: float, less: bool
) -> None:
    """288 steps and 300 at one speed. Worse by fewer, or better by more, counts only beyond what 12 may be worth."""
    names = ("RALEARN",) if less else ARMS
    study = a_study(tmp_path / "one", effect=effect, ends=dict.fromkeys(names, 288))
    made = built(study)
    worth = slope(study, all_runs(names)) * math.log(300 / 288)
    assert 0.12 < worth < 0.19
    judged = made.judged[0]
    assert judged.allowance.move == pytest.approx(-worth if less else worth)
    assert judged.result.difference.contains_zero is False
    refused = (effect > 0) is less and abs(effect) < worth
    assert (judged.beyond_noise, judged.is_owed) == (not refused, refused)
    markdown, terminal, page = pages(made, study)
    reason = f"it trained for {'less' if less else 'more'} time than the equivalent arms, which may be worth as much"
    for told in (markdown, terminal, page):
        assert (reason in told) is refused
    needed = (
        f"to be called {'worse' if less else 'better'} it has to be so by that much as well, and more seeds"
    )
    assert needed in markdown
    assert needed in page
    own, arms = (2880, 3000) if less else (3000, 2880)
    assert (
        f"trained for {own:,} s, the equivalent arms for {arms:,} s: with what that may be worth ["
        in markdown
    )
    paired = next(row.against_baseline for row in made.rows if row.variant == "RALEARN")
    assert paired is not None
    assert paired.low is not None
    assert paired.high is not None
    unsure = paired.low - (worth if less else 0) < 0 < paired.high + (0 if less else worth)
    at_the_end = markdown[: markdown.index("At equal tokens (")]
    assert ("cannot tell, as training was not equal" in at_the_end) is (unsure and not paired.contains_zero)
    assert "At equal time: the last step" not in markdown
    row = next(line for line in render.terminal(made).splitlines() if line.startswith("RALEARN"))
    assert ("%?" in row) is unsure


def test_the_figure_of_the_verdict_has_the_interval_that_the_verdict_goes_by(tmp_path: Path) -> None:
    made = built(a_study(tmp_path / "one", effect=0.05, ends={"RALEARN": 288}))
    drawn = figures_final.differences(made)
    assert drawn is not None
    (trace,) = [one for one in drawn["data"] if one["marker"]["symbol"] == "diamond"]
    assert trace["x"][0] - trace["error_x"]["arrayminus"][0] < 0 < trace["x"][0]


@pytest.mark.parametrize("lowest", [0.0, 0.75])
def test_where_the_loss_rose_again_only_equal_times_are_judged(tmp_path: Path, lowest: float) -> None:
    """Overfitted: every run is on one curve, so that what trained for less looks better for it."""
    study = a_study(tmp_path / "one", ends=dict.fromkeys(ARMS, 288))
    draw = np.random.default_rng(1)
    for run in all_runs(VARIANTS):
        noise = 0.002 * float(draw.normal())
        bend(study, [run], lambda share, noise=noise: 4.0 + 2 * (share - lowest) ** 2 + noise)
    made = built(study)
    assert [*made.misplanned] == ["RALEARN"]
    assert made.judged == []


@pytest.mark.parametrize(("seconds", "known"), [(EQUAL * 3000 + 1, True), (EQUAL * 3000 - 1, False)])
def test_without_an_evaluation_early_enough_only_equal_times_are_judged(
    tmp_path: Path, seconds: float, known: bool
) -> None:
    study = a_study(tmp_path / "one", effect=0.2, ends={"RALEARN": 299})
    for seed in range(3):
        rows = run_record.load(study / "runs" / f"RALEARN{seed}")["validation"]["history"]
        edit(study, f"RALEARN{seed}", validation={"history": rows[-2:]}, progress={"train_seconds": seconds})
    made = built(study)
    assert bool(made.judged) is known
    told = "what that may be worth is not known without an evaluation in the first half of each run"
    for page in pages(made, study):
        assert (told in page) is not known


def test_of_a_variant_that_varies_more_its_own_spread_has_to_show_more_than_time_may_be_worth(
    tmp_path: Path,
) -> None:
    study = a_study(tmp_path / "one", effect=0.19, ends={"RALEARN": 288})
    for seed, extra in enumerate((-0.02, 0.0, 0.02)):
        seen = run_record.load(study / "runs" / f"RALEARN{seed}")["validation"]
        moved = [[tokens, seconds, loss + extra] for tokens, seconds, loss in seen["history"]]
        edit(study, f"RALEARN{seed}", validation={"loss": seen["loss"] + extra, "history": moved})
    judged = built(study).judged[0]
    assert judged.result.varies_more
    assert judged.result.own.contains_zero is False
    assert judged.allowed(judged.result.difference).contains_zero is False
    assert judged.is_owed
    assert not judged.beyond_noise


def test_times_are_paired_by_seed_as_the_differences_are(tmp_path: Path) -> None:
    """6 % less at every seed. Runs that are missing at the slow seed do not hide it."""
    study = a_study(tmp_path / "one", effect=0.06, ends={"RALEARN": 282})
    known = slope(study, all_runs(["RALEARN"]))
    for seed in (1, 2):
        for name in VARIANTS:
            spent = run_record.load(study / "runs" / f"{name}{seed}")["progress"]["train_seconds"]
            edit(study, f"{name}{seed}", progress={"train_seconds": 0.8 * spent})
    whole = built(study).judged[0].allowance.move
    for name in ARMS[1:]:
        edit(study, f"{name}0", status="failed")
    fewer = built(study).judged[0].allowance.move
    assert whole == pytest.approx(known * math.log(282 / 300))
    assert fewer == pytest.approx(whole)


def test_runs_of_different_cards_are_not_at_equal_time_whatever_their_clocks_say(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", effect=0.2, ends={"RALEARN": 288})
    for seed in range(3):
        edit(study, f"RALEARN{seed}", target={"device": "another"}, progress={"train_seconds": 3000.0})
    made = built(study)
    assert made.judged == []
    assert "it ended at other tokens than the equivalent arms, on another card" in flat(render.markdown(made))


@pytest.mark.parametrize("budget", [{}, {"max_tokens": 10**12}, {"max_iterations": 10**6}])
def test_it_does_not_hang_on_what_the_plan_says(tmp_path: Path, budget: dict[str, int]) -> None:
    study = a_study(tmp_path / "one", effect=0.05, ends={"RALEARN": 288})
    assert not built(study, **budget).judged[0].beyond_noise
    files.write_json(study / "plan.json", {"budget": None, "notes": None, "margin": "much"})
    assert not report.build_report(study).judged[0].beyond_noise
    (study / "plan.json").unlink()
    assert not report.build_report(study).judged[0].beyond_noise


def test_holm_adjusts_what_the_allowance_leaves(tmp_path: Path) -> None:
    names = (*VARIANTS, "OWN", "OWN2", "OWN3")
    study = a_study(tmp_path / "one", variants=names, effect=0.0205, ends={"RALEARN": 299})
    judged = next(one for one in built(study).judged if one.variant == "RALEARN")
    seen = judged.result
    assert seen.difference.high is not None
    error = (seen.difference.high - seen.difference.mean) / 2.2621571628  # t of 9 degrees of freedom
    left = seen.difference.mean + (judged.allowance.move or 0.0)
    assert seen.p_value == pytest.approx(t_p_value(left / error, 9), rel=1e-6)
    assert seen.p_value < 0.05 < judged.adjusted_p
    assert not judged.beyond_noise


def test_two_real_changes_are_told_apart_beyond_what_time_may_be_worth_between_them(tmp_path: Path) -> None:
    for effect, sure in ((0.06, False), (0.4, True)):
        folders = [tmp_path / f"{name}{effect}" for name in ("one", "other")]
        for folder in folders:
            a_study(folder, variants=(*VARIANTS, "OWN"), effect=effect, ends={"RALEARN": 280})
            built(folder)
        compared = compare.build_comparison(folders)
        places = {place.variant: place for place in rank(compared.studies[0]).places}
        assert ("OWN" in places["RALEARN"].worse_than) is sure


def test_a_comparison_says_of_which_differences_training_was_not_equal(tmp_path: Path) -> None:
    """Studies of other models, so that each is held against its own baseline."""
    for name, effect in (("one", 0.06), ("other", 0.4)):
        study = a_study(tmp_path / name, effect=effect, ends={"RALEARN": 280})
        for run in all_runs(VARIANTS):
            edit(study, run, fingerprint={"model": name * 16})
        built(study)
    compared = compare.build_comparison([tmp_path / "one", tmp_path / "other"])
    assert compared.absolute == []
    row = next(
        line for line in compare_render.markdown(compared).splitlines() if line.startswith("| RALEARN |")
    )
    assert [cell.endswith("as training was not equal ") for cell in row.split("|")[2:4]] == [True, False]


def test_a_difference_to_the_baseline_has_the_baselines_own_time(tmp_path: Path) -> None:
    """RALEARN had less time than the arms on average, and more than B."""
    study = a_study(tmp_path / "one", effect=0.05, ends={"RALEARN": 288})
    for seed in range(3):
        edit(study, f"B{seed}", progress={"train_seconds": 2700.0})
    made = built(study)
    row = next(row for row in made.rows if row.variant == "RALEARN")
    assert (made.judged[0].allowance.move or 0.0) < 0 < (row.allowance.move or 0.0)


def test_nobody_elses_p_depends_on_a_variant_that_cannot_be_judged(tmp_path: Path) -> None:
    """OWN has the arms' schedule; RALEARN has not."""
    p = []
    for names in (("B", "RAALL", "RALATE", "OWN"), ("B", "RAALL", "RALATE", "OWN", "RALEARN")):
        study = a_study(tmp_path / str(len(names)), variants=names, ends={"RALEARN": 280})
        judged = {seen.variant: seen for seen in built(study).judged_equal_tokens}
        assert judged["OWN"].judged_together == 1
        assert judged["OWN"].adjusted_p == judged["OWN"].result.p_value
        p += [seen.adjusted_p for name, seen in judged.items() if name == "RALEARN"]
    assert p == [1.0]


@given(st.floats(0.1, 2.0), st.floats(0.2, 1.5), st.integers(230, 299), st.sampled_from(["RALEARN", "arms"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_on_curves_as_training_has_them_the_allowance_covers_what_more_of_it_gives(
    tmp_path_factory: pytest.TempPathFactory, scale: float, power: float, end: int, shorter: str
) -> None:
    """Every run is on one curve, a power of its tokens: whatever the difference of times, there is no effect."""
    names = ("RALEARN",) if shorter == "RALEARN" else ARMS
    study = a_study(tmp_path_factory.mktemp("one"), ends=dict.fromkeys(names, end))
    draw = np.random.default_rng(end)
    for run in all_runs(VARIANTS):
        noise = 0.0005 * float(draw.normal())
        bend(study, [run], lambda share, noise=noise: 3.0 + scale * share**-power + noise)
    made = built(study)
    gain = scale * ((end / STEPS) ** -power - 1)
    move = made.judged[0].allowance.move
    assert move is not None
    assert gain <= abs(move) + 0.001
    assert abs(move) <= 5 * gain + 0.05 * math.log(STEPS / end)
    assert (move < 0) is (shorter == "RALEARN")
    assert not made.judged[0].beyond_noise


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_what_is_left_is_never_more_nor_of_another_sign(difference: float, move: float) -> None:
    left = what_is_left(difference, move)
    assert abs(left) <= abs(difference)
    assert left == 0 or (left > 0) is (difference > 0)
    moved = difference + move
    assert (left == 0) is (difference == 0 or moved == 0 or (moved > 0) is not (difference > 0))


@pytest.mark.parametrize(
    "progress", [{"train_seconds": 0.0}, {"tokens": 0}, {"tokens": 0, "train_seconds": 0.0, "iterations": 0}]
)
def test_a_run_of_nothing_is_no_crash(tmp_path: Path, progress: dict[str, float]) -> None:
    study = a_study(tmp_path / "one", ends={"RALEARN": 288})
    for seed in range(3):
        edit(study, f"RALEARN{seed}", progress=progress)
    assert built(study).judged == []


# -- schedules at equal tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [240, 294, 306, STEPS])
@pytest.mark.parametrize("effect", [-0.3, 0.0, 0.3])
def test_at_equal_tokens_only_runs_of_one_schedule_are_judged(
    tmp_path: Path, effect: float, end: int
) -> None:
    """A curve that bends with the schedule makes a difference where there is none, either way."""
    study = a_study(tmp_path / "one", effect=effect, ends={"RALEARN": end})
    made = built(study)
    (judged,) = made.judged_equal_tokens
    assert judged.allowance.move == (0.0 if end == STEPS else None)
    assert judged.beyond_noise is (end == STEPS and effect != 0)
    difference = judged.result.difference
    assert judged.is_owed is (end != STEPS and difference.contains_zero is False)
    length = f"its schedule is {'shorter' if end < STEPS else 'longer'} than the equivalent arms'"
    markdown, terminal, page = pages(made, study)
    for told in (markdown, terminal, page):
        assert (
            f"cannot tell: {length}, so that learning rates may differ at these tokens" in told
        ) is judged.is_owed
        assert f"at equal tokens ({made.equal_tokens:,}): worse" not in told.lower()
    if judged.is_owed:
        numbers = f"its schedule is {end * UPDATE:,} tokens long, the arms' {STEPS * UPDATE:,}"
        assert numbers in markdown
        assert numbers in page
        against = next(row.against_baseline_equal_tokens for row in made.rows if row.variant == "RALEARN")
        assert against is not None
        below = markdown[markdown.index("At equal tokens (") :]
        assert ("cannot tell, as training was not equal" in below) is not against.contains_zero
    shared = sorted(set.intersection(*(set(losses(run.record)) for run in made.runs)))
    said = figures_ranking.in_words(made, figures_ranking.over_training(made, shared))
    assert (f"RALEARN is not told from the equivalent arms anywhere: {length}" in said) is (end != STEPS)
    assert ("RALEARN is better than the equivalent arms at" in said) is (end == STEPS)


@pytest.mark.parametrize(("effect", "own", "others"), [(-0.3, 1, 3.5), (0.3, 5, 2.5), (0.0, 3, 3)])
def test_ranks_over_training_tell_apart_what_the_verdict_does(
    tmp_path: Path, effect: float, own: float, others: float
) -> None:
    made = built(a_study(tmp_path / "one", effect=effect))
    drawn = figures_ranking.over_training(made, [UPDATE * STEPS])
    assert drawn is not None
    ranks = next(view for view in drawn["choices"][0]["options"] if view["name"] == "rank")["data"]
    lines = [trace["meta"]["variant"] for trace in drawn["data"] if "meta" in trace]
    seen = dict(zip(lines, [rank["y"] for rank in ranks if "hovertemplate" in rank], strict=True))
    assert seen == {name: [others] for name in ARMS} | {"RALEARN": [own]}


def test_schedules_are_compared_seed_by_seed_and_a_record_need_not_have_one(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", seeds=2)
    for seed, (own, theirs) in enumerate(((300, 290), (290, 300))):
        for name in VARIANTS:
            edit(study, f"{name}{seed}", schedule={"iterations": own if name == "RALEARN" else theirs})
    assert [*by_schedule(read_runs(study))] == ["RALEARN"]
    for run in (study / "runs").iterdir():
        value = run_record.load(run)
        del value["schedule"]
        files.write_json(run / "run.json", value)
    assert by_schedule(read_runs(study)) == {}
    assert built(study).judged


def test_a_run_that_was_cut_keeps_its_schedule(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", effect=0.1)
    edit(
        study,
        "RALEARN1",
        schedule={"iterations": STEPS, "cut": True},
        progress={"tokens": 250 * UPDATE, "iterations": 250},
    )
    assert by_schedule([run for run in read_runs(study) if run.used]) == {}
    edit(study, "RALEARN1", schedule={"iterations": STEPS - 1})
    assert [*by_schedule([run for run in read_runs(study) if run.used])] == ["RALEARN"]
