"""The order of the variants: as far as noise permits one, never from one seed, and across studies."""

import dataclasses
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runtime import run_record
from study.analysis.verdict import BETTER, judge
from study.compare import compared_studies as build
from study.compare import compared_studies as compare_ranking
from study.compare.compared_studies import NO_ORDER, Order
from tests.study.compared import (
    VARIANTS,
    Change,
    Settings,
    a_record,
    a_study,
    markdown,
    page,
    put,
    unchanged,
)

ARMS = VARIANTS[:-1]


def cut(*names: str) -> Change:
    """A change that ends these runs early, as the training clock does, at a loss that is far too high."""

    def change(value: dict[str, Any], config: Settings) -> None:
        if value["run"] in names:
            value["schedule"]["cut"] = True
            value["progress"] |= {"iterations": 60, "tokens": 30720}
            value["validation"] |= {"loss": 9.0, "history": [[25600, 30.0, 9.5], [30720, 36.0, 9.0]]}

    return change


def orders(folder: Path, *changes: Change, **options: Any) -> list[Order]:
    """Of studies that differ by their changes alone; the first is unchanged."""
    studies = [a_study(folder / str(n), change, **options) for n, change in enumerate((unchanged, *changes))]
    return build.build_comparison(studies).orders


def test_a_truncated_run_is_not_ranked(tmp_path: Path) -> None:
    whole, short = orders(tmp_path, cut("RALEARN1"), seeds=(0, 1, 2, 3))
    assert (whole.seeds, short.seeds, short.ranked) == ([0, 1, 2, 3], [0, 2, 3], list(VARIANTS))
    assert short.places("RALEARN") == (1, 1)  # the cut run's loss would have put it last


def test_a_variant_with_one_complete_seed_is_named_and_not_ranked(tmp_path: Path) -> None:
    studies = [a_study(tmp_path / "0"), a_study(tmp_path / "1", cut("RALEARN1"))]
    comparison = build.build_comparison(studies)
    assert (comparison.orders[1].seeds, comparison.orders[1].ranked) == ([0, 1], list(ARMS))
    assert comparison.across[-1].places == [(1, 5), None]
    assert "RALEARN1" in markdown(comparison)


def all_cut(value: dict[str, Any], config: Settings) -> None:
    value["schedule"]["cut"] = True
    value["progress"]["tokens"] -= len(value["run"])
    value["validation"]["history"][-1][0] -= len(value["run"])


def test_runs_truncated_at_different_points_are_not_ranked(tmp_path: Path) -> None:
    found = orders(tmp_path, all_cut)[1]
    assert (found.ranked, found.seeds, found.why_not) == ([], [], compare_ranking.ALL_CUT)


@pytest.mark.parametrize(
    ("effect", "draw"), [(0.0, 0), (0.0, 4), (-0.006, 1), (-0.006, 3), (0.006, 3), (0.05, 2)]
)
def test_every_observed_rank_lies_in_its_permitted_range(
    first: Path, tmp_path: Path, effect: float, draw: int
) -> None:
    """draw: the seed of the noise, and how many runs are truncated. The rank of a control arm is any of its class."""
    names = [f"{name}{seed}" for name in VARIANTS for seed in range(3)]
    chosen = np.random.default_rng(draw).choice(names, size=draw, replace=False)
    folder = a_study(tmp_path / "two", cut(*chosen), seeds=(0, 1, 2), noise=draw, effect=effect)
    found = build.build_comparison([first, folder]).orders[1]
    means = {name: np.mean([json.loads((folder / "runs" / f"{name}{seed}" / "run.json").read_text())
                            ["validation"]["loss"] for seed in found.seeds]) for name in found.ranked}  # fmt: skip
    arms = [means[name] for name in ARMS if name in means]
    if (places := found.places("RALEARN")) is not None:
        assert places[0] <= (1 if means["RALEARN"] < np.mean(arms) else len(means)) <= places[1]
    assert len({found.places(name) for name in ARMS if name in means}) == 1


def test_a_function_class_is_ranked_by_the_mean_of_its_arms() -> None:
    losses = {"B": [4.0] * 3, "RAALL": [4.1] * 3, "RALEARN": [4.02] * 3}
    table = {name: dict(enumerate(by_seed)) for name, by_seed in losses.items()}
    verdict = dataclasses.replace(judge(table)[0], word=BETTER)
    assert compare_ranking.better_pairs(losses, [verdict]) == [("RALEARN", "B"), ("RALEARN", "RAALL")]


def test_one_seed_gives_no_ranking_and_no_verdict(tmp_path: Path) -> None:
    comparison = build.build_comparison(
        [a_study(tmp_path / name, seeds=(0,), noise=n) for n, name in enumerate("ab")]
    )
    assert [(one.ranked, one.why_not) for one in comparison.orders] == [([], NO_ORDER)] * 2
    content = build.as_json(comparison)
    assert {one["why_not"] for one in content["orders"]} == {NO_ORDER}
    assert [one["variant"] for one in content["studies"][0]["verdicts"]] == ["RALEARN"]
    assert {place for row in content["across"] for place in row["places"]} == {None}


def with_own(folder: Path, effects: dict[str, float], seeds: int = 4, noise: int = 0) -> Path:
    """Four control arms and real changes of the given effects in nats; runs vary by 0.005."""
    draw = np.random.default_rng(noise)
    for seed in range(seeds):
        for name in (*ARMS, *effects):
            loss = 4.0 + 0.005 * float(draw.normal()) + effects.get(name, 0.0)
            put(folder, a_record(name, seed, loss), None, None)
    return folder


def test_two_real_changes_are_ranked_by_holm_over_their_pairs(tmp_path: Path) -> None:
    effects = {"OWN_A": -0.10, "OWN_B": -0.11, "OWN_C": -0.13, "OWN_D": -0.135}
    settled = 0
    for draw in range(6):
        folder = with_own(tmp_path / f"{draw}a", effects, noise=draw)
        other = with_own(tmp_path / f"{draw}b", effects, noise=99)
        found = build.build_comparison([folder, other]).orders[0]
        table = {
            name: [json.loads((folder / "runs" / run_record.run_name(name, seed) / "run.json").read_text())
                   ["validation"]["loss"] for seed in range(4)] for name in effects
        }  # fmt: skip
        pairs = list(combinations(effects, 2))
        raw = {pair: float(stats.ttest_rel(table[pair[0]], table[pair[1]]).pvalue) for pair in pairs}
        rejected: set[tuple[str, str]] = set()
        for rank, pair in enumerate(sorted(pairs, key=lambda pair: raw[pair])):  # Holm, step down
            if raw[pair] >= 0.05 / (len(pairs) - rank):
                break
            rejected.add(pair)
        output = {pair for pair in found.better if {*pair} <= {*effects}}
        assert {tuple(sorted(pair)) for pair in output} == rejected
        assert all(np.mean(table[a]) < np.mean(table[b]) for a, b in output)
        settled += len([pair for pair in pairs if raw[pair] < 0.05]) - len(rejected)
    assert settled > 0  # the adjustment decides something here


def agreement(folder: Path, first: dict[str, float], second: dict[str, float]) -> set[str]:
    comparison = build.build_comparison(
        [with_own(folder / "a", first), with_own(folder / "b", second, noise=1)]
    )
    return {row.agreement for row in comparison.across}


def test_rankings_on_two_cards_agree_contradict_or_are_inconclusive(tmp_path: Path) -> None:
    better, worse, none = {"RALEARN": -0.1}, {"RALEARN": 0.1}, {"RALEARN": 0.0}
    assert agreement(tmp_path / "1", better, better) == {compare_ranking.AGREE}
    assert agreement(tmp_path / "2", better, worse) == {compare_ranking.CONTRADICT}
    assert agreement(tmp_path / "3", better, none) == {compare_ranking.SOME}
    assert agreement(tmp_path / "4", none, none) == {compare_ranking.NONE}


def test_ranks_across_studies_are_among_their_common_variants(tmp_path: Path) -> None:
    first = with_own(tmp_path / "a", {"RALEARN": -0.1, "OWN": -0.3})
    comparison = build.build_comparison([first, with_own(tmp_path / "b", {"RALEARN": -0.1})])
    assert [(row.variant, row.places) for row in comparison.across] == [
        *((name, [(2, 5), (2, 5)]) for name in ARMS),
        ("RALEARN", [(1, 1), (1, 1)]),
    ]
    for text in (markdown(comparison), page(comparison)):
        assert "places in a" in text
        assert "2 to 5" in text
        assert compare_ranking.AGREE in text
