"""The verdict: a paired t over seeds against the mean of the control arms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from referee.verdict.looks import nominal_levels
from study.analysis.verdict import (
    BETTER,
    CANNOT_TELL,
    EQUIVALENT,
    EXPLORATORY,
    INTERIM,
    MARGIN,
    PRIMARY,
    WORSE,
    Verdict,
    earlier_verdicts,
    judge,
)

CONTROLS = ("B", "RAEARLY", "RALATE", "RAALL")
Table = dict[str, dict[int, float]]

noise = st.floats(-0.02, 0.02).map(lambda value: round(value, 6))
tables = st.integers(3, 8).flatmap(
    lambda seeds: st.lists(st.lists(noise, min_size=6, max_size=6), min_size=seeds, max_size=seeds)
)


def table(rows: list[list[float]], names: tuple[str, ...] = (*CONTROLS, "RALEARN", "MINE")) -> Table:
    """Losses around 4 nats; a row a seed, a column a variant."""
    return {
        name: {seed: 4 + row[place] for seed, row in enumerate(rows)}
        for place, name in enumerate(names[: len(rows[0])])
    }


def drawn(seeds: int, ratio: float, effect: float, draw: np.random.Generator, sigma: float = 0.007) -> Table:
    """Seeds differ by 0.05 nats; RALEARN's variance is `ratio` times that of a control arm."""
    values = 4 + 0.05 * draw.normal(size=(seeds, 1)) + sigma * draw.normal(size=(seeds, 5)) * (
        1, 1, 1, 1, math.sqrt(ratio)
    )  # fmt: skip
    values[:, 4] += effect
    return {name: dict(enumerate(values[:, k].tolist())) for k, name in enumerate((*CONTROLS, "RALEARN"))}


def only(losses: Table) -> Verdict:
    (verdict,) = judge(losses)
    return verdict


@given(tables)
def test_p_value_and_interval_are_those_of_the_paired_t_test_of_scipy(rows: list[list[float]]) -> None:
    losses = table([row[:5] for row in rows])
    mine = [losses["RALEARN"][seed] for seed in range(len(rows))]
    arms = [
        np.mean(list(dict.fromkeys(losses[name][seed] for name in CONTROLS))) for seed in range(len(rows))
    ]
    verdict, expected = only(losses), stats.ttest_rel(mine, arms)
    if verdict.test.spread and verdict.test.spread > 1e-6:
        assert verdict.test.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
        interval = expected.confidence_interval(0.95)
        assert verdict.test.difference.low == pytest.approx(interval.low, abs=1e-9)
        assert verdict.test.difference.high == pytest.approx(interval.high, abs=1e-9)
        narrow = expected.confidence_interval(0.90)
        assert verdict.test.narrow.low == pytest.approx(narrow.low, abs=1e-9)


@given(tables, st.lists(st.floats(-3, 3), min_size=8, max_size=8))
def test_shifting_all_losses_of_a_seed_changes_no_verdict(
    rows: list[list[float]], shifts: list[float]
) -> None:
    before = judge(table(rows))
    shifted = table([[loss + shifts[seed] for loss in row] for seed, row in enumerate(rows)])
    for one, other in zip(before, judge(shifted), strict=True):
        assert other.test.difference.mean == pytest.approx(one.test.difference.mean, abs=1e-9)
        if min(abs((one.adjusted_p or 0) - 0.05), abs((one.test.spread or 0) - 1e-9)) > 1e-6:
            assert other.word == one.word


@given(tables)
def test_changing_the_sign_of_every_loss_swaps_better_and_worse(rows: list[list[float]]) -> None:
    swapped = {BETTER: WORSE, WORSE: BETTER}
    before, after = judge(table(rows)), judge(table([[-loss - 8 for loss in row] for row in rows]))
    for one, other in zip(before, after, strict=True):
        if abs((one.adjusted_p or 0) - 0.05) > 1e-6 and (one.test.spread or 0) > 1e-9:
            assert other.word == swapped.get(one.word, one.word)
            assert other.test.difference.mean == pytest.approx(-one.test.difference.mean, abs=1e-9)


@given(tables)
def test_a_seed_without_control_arms_changes_nothing(rows: list[list[float]]) -> None:
    losses = table(rows)
    before = judge(losses)
    losses["RALEARN"][99] = 1.0
    assert judge(losses) == before


@given(tables)
def test_a_control_arm_under_a_second_name_changes_nothing(rows: list[list[float]]) -> None:
    losses = table(rows)
    assert judge(losses | {"RAALT": losses["RALATE"]}) == judge(losses)


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_fewer_than_three_seeds_there_is_a_difference_and_no_verdict(seeds: int) -> None:
    verdict = only(drawn(seeds, 1, -0.5, np.random.default_rng(0)))
    assert (verdict.word, verdict.adjusted_p, verdict.seeds) == (CANNOT_TELL, None, seeds)
    assert verdict.test.difference.mean == pytest.approx(-0.5, abs=0.05)


def test_a_large_effect_is_better_or_worse_and_a_small_one_equivalent_within_the_margin() -> None:
    draw = np.random.default_rng(1)
    assert only(drawn(5, 1, -0.1, draw)).word == BETTER
    assert only(drawn(5, 1, 0.1, draw)).word == WORSE
    near = only(drawn(9, 1, 0.0, draw, sigma=0.002))
    assert near.word == EQUIVALENT
    assert near.test.narrow.low is not None
    assert near.test.narrow.high is not None
    assert -MARGIN < near.test.narrow.low < near.test.narrow.high < MARGIN
    assert only(drawn(3, 10, 0.0, draw)).word == CANNOT_TELL


def test_equivalence_is_decided_by_the_90_percent_interval() -> None:
    """Two one-sided 5 % tests: the 95 % interval of this study reaches beyond the margin, the 90 % one does not."""
    verdict = only(table([[0, 0, 0, 0, difference] for difference in (-0.004, 0.004, 0.011, 0.0, 0.009)]))
    narrow, wide = verdict.test.narrow, verdict.test.difference
    assert narrow.high is not None
    assert wide.high is not None
    assert narrow.high < MARGIN < wide.high
    assert verdict.word == EQUIVALENT


def test_better_takes_precedence_over_equivalent() -> None:
    losses = table([[0, 0.0001, 0.0002, 0.0003, -0.003 + 0.0001 * seed] for seed in range(5)])
    assert only(losses).word == BETTER
    assert only(losses).test.difference.mean > -MARGIN


def test_p_values_are_adjusted_by_holm_over_the_variants_with_enough_seeds() -> None:
    draw = np.random.default_rng(4)
    losses = drawn(5, 1, -0.012, draw)
    losses["MINE"] = {seed: 4.0 + 0.05 * float(draw.normal()) for seed in range(5)}
    losses["SHORT"] = {0: 4.0, 1: 4.1}
    verdicts = {verdict.variant: verdict for verdict in judge(losses)}
    assert {verdict.judged_together for verdict in verdicts.values()} == {2}
    raw = [verdicts[name].test.p_value or 0.0 for name in ("RALEARN", "MINE")]
    assert verdicts["RALEARN"].adjusted_p == pytest.approx(min(1.0, 2 * raw[0]))
    assert verdicts["MINE"].adjusted_p == pytest.approx(max(2 * raw[0], raw[1]))
    assert verdicts["SHORT"].adjusted_p is None


def test_the_baseline_alone_is_a_sufficient_control_arm() -> None:
    losses = {name: by_seed for name, by_seed in drawn(5, 1, -0.1, np.random.default_rng(2)).items()
              if name in ("B", "RALEARN")}  # fmt: skip
    assert (only(losses).word, only(losses).controls) == (BETTER, [1] * 5)
    assert judge({"RALEARN": {0: 4.0, 1: 4.0, 2: 4.0}}) == []


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([1.0, 4.0, 10.0]), st.sampled_from([3, 5, 9]))
def test_false_positives_are_5_percent_and_coverage_95_at_every_variance_of_the_variant(
    ratio: float, seeds: int
) -> None:
    """1,500 studies a cell; 3 to 7 % is four standard errors."""
    draw, wrong, covered = np.random.default_rng(seeds), 0, 0
    for _ in range(1500):
        verdict = only(drawn(seeds, ratio, 0.0, draw))
        wrong += verdict.word in (BETTER, WORSE)
        covered += verdict.test.difference.contains_zero is True
    assert 0.027 <= wrong / 1500 <= 0.073
    assert 0.927 <= covered / 1500 <= 0.973


def two_variants(seeds: int, draw: np.random.Generator) -> Table:
    losses = drawn(seeds, 1, -0.012, draw)
    losses["MINE"] = {seed: loss + 0.01 * float(draw.normal()) for seed, loss in losses["B"].items()}
    return losses


def test_the_primary_comparison_is_not_adjusted_and_the_others_share_holm() -> None:
    losses = two_variants(5, np.random.default_rng(4))
    losses["OTHER"] = {seed: loss + 0.004 for seed, loss in losses["RALEARN"].items()}
    alone = {name: only({**{arm: losses[arm] for arm in CONTROLS}, name: losses[name]}) for name in losses
             if name not in CONTROLS}  # fmt: skip
    verdicts = {one.variant: one for one in judge(losses, primary="RALEARN")}
    assert {name: one.role for name, one in verdicts.items()} == {
        "RALEARN": PRIMARY, "MINE": EXPLORATORY, "OTHER": EXPLORATORY,
    }  # fmt: skip
    assert [one.judged_together for one in verdicts.values()] == [1, 2, 2]
    assert verdicts["RALEARN"].adjusted_p == alone["RALEARN"].adjusted_p
    smaller = min("MINE", "OTHER", key=lambda name: alone[name].adjusted_p or 0.0)
    assert verdicts[smaller].adjusted_p == pytest.approx(min(1.0, 2 * (alone[smaller].adjusted_p or 0.0)))


def test_before_the_planned_seeds_there_is_a_difference_and_no_verdict() -> None:
    losses = drawn(6, 1, -0.5, np.random.default_rng(0))
    early = {name: {seed: by_seed[seed] for seed in range(4)} for name, by_seed in losses.items()}
    (verdict,) = judge(early, looks={"RALEARN": (6,)})
    assert (verdict.word, verdict.adjusted_p, verdict.seeds, verdict.finished) == (INTERIM, None, 4, 4)
    assert verdict.test.difference.high is not None
    assert verdict.test.difference.high < 0
    assert judge(losses, looks={"RALEARN": (6,)})[0].word == BETTER
    assert judge(losses, looks={"RALEARN": (6,)}, finished={"RALEARN": 5})[0].word == INTERIM
    assert judge(losses, looks={"RALEARN": (9,)})[0].word == INTERIM  # CONFIG_SEEDS was lowered to 6


def test_seeds_beyond_the_last_look_do_not_count() -> None:
    losses = drawn(6, 1, 0.0, np.random.default_rng(1))
    (verdict,) = judge(losses, looks={"RALEARN": (4,)})
    early = {name: {seed: by_seed[seed] for seed in range(4)} for name, by_seed in losses.items()}
    assert verdict == judge(early, looks={"RALEARN": (4,)})[0]


def test_an_interim_variant_counts_as_a_test_of_the_others() -> None:
    losses = two_variants(5, np.random.default_rng(4))
    verdicts = {one.variant: one for one in judge(losses, looks={"RALEARN": (5,), "MINE": (9,)})}
    assert (verdicts["MINE"].word, verdicts["RALEARN"].judged_together) == (INTERIM, 2)
    (alone,) = judge({name: losses[name] for name in (*CONTROLS, "RALEARN")}, looks={"RALEARN": (5,)})
    assert verdicts["RALEARN"].adjusted_p == pytest.approx(min(1.0, 2 * (alone.adjusted_p or 0.0)))


@given(tables.filter(lambda rows: len(rows) >= 5), st.sampled_from([(), (3,), (4,), (3, 4)]))
def test_verdict_interval_and_p_value_agree_at_every_look(
    rows: list[list[float]], earlier: tuple[int, ...]
) -> None:
    looks = (*earlier, len(rows))
    (verdict,) = judge(table([row[:5] for row in rows]), looks={"RALEARN": looks})
    if (verdict.test.spread or 0) < 1e-6 or abs((verdict.adjusted_p or 0) - 0.05) < 1e-4:
        return
    assert verdict.level == nominal_levels(looks)[-1]
    decided = verdict.word in (BETTER, WORSE)
    assert decided == ((verdict.test.p_value or 0) < verdict.level)
    assert decided == (not verdict.test.difference.contains_zero)
    assert decided == (verdict.adjusted_p is not None and verdict.adjusted_p < 0.05)
    if verdict.word == EQUIVALENT and abs((verdict.equivalence_p or 0) - 0.05) > 1e-4:
        low, high = verdict.test.narrow.low, verdict.test.narrow.high
        assert low is not None
        assert high is not None
        assert -MARGIN < low < high < MARGIN


def test_a_look_of_two_seeds_has_no_verdict_and_spends_nothing() -> None:
    losses = drawn(5, 1, -0.1, np.random.default_rng(3))
    after, planned = (judge(losses, looks={"RALEARN": looks})[0] for looks in ((1, 2, 5), (5,)))
    assert (after.level, after.adjusted_p, after.word) == (planned.level, planned.adjusted_p, BETTER)


def test_reading_at_every_seed_keeps_5_percent() -> None:
    """Looks at 3, 4, ... 8 seeds in 1,500 studies; without looks about 15 % are false."""
    draw, wrong, naive = np.random.default_rng(11), 0, 0
    for _ in range(1500):
        losses, said, plain = drawn(8, 1, 0.0, draw), set(), set()
        for seeds in range(3, 9):
            early = {name: {seed: by_seed[seed] for seed in range(seeds)} for name, by_seed in losses.items()}
            said.add(judge(early, looks={"RALEARN": tuple(range(3, seeds + 1))})[0].word)
            plain.add(judge(early)[0].word)
        wrong, naive = wrong + bool(said & {BETTER, WORSE}), naive + bool(plain & {BETTER, WORSE})
    assert wrong / 1500 <= 0.073
    assert naive / 1500 > 0.1


def test_a_called_difference_has_the_smallest_callable_one_and_its_exaggeration() -> None:
    found = only(drawn(5, 1, -0.1, np.random.default_rng(1)))
    interval = found.test.difference
    assert interval.low is not None
    assert found.callable_from == pytest.approx(interval.mean - interval.low)
    assert found.exaggeration == pytest.approx(1.0, abs=0.01)
    quiet = only(drawn(9, 1, 0.0, np.random.default_rng(1), sigma=0.002))
    assert (quiet.callable_from, quiet.exaggeration) == (None, None)


def test_verdicts_at_earlier_looks_are_those_that_were_given_then() -> None:
    losses = two_variants(6, np.random.default_rng(4))
    looks = {"RALEARN": (3, 5, 6), "MINE": (5,), "B": (3, 5, 6)}
    found = earlier_verdicts(losses, MARGIN, "RALEARN", looks)
    assert [(one.variant, one.looks) for one in found] == [("RALEARN", (3,)), ("RALEARN", (3, 5))]
    then = {
        name: {seed: by_seed[seed] for seed in range(3)} for name, by_seed in losses.items() if name != "MINE"
    }
    assert found[0] == judge(then, MARGIN, "RALEARN", {"RALEARN": (3,)})[0]
    assert earlier_verdicts(losses, MARGIN, "", {"RALEARN": (1, 6)}) == []
