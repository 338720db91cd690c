"""Simulate studies and judge them by the levels, intervals and checks of the report: error rates, coverage, power.

    python -m scripts.dev.simulate_verdicts [STUDIES]    100,000 studies a cell by default: minutes on one core

A study has the control arms B, RAEARLY, RALATE and RAALL, and RALEARN. Runs of one seed differ by SIGMA; the shift that
all runs of a seed share drops out of the differences. RALEARN's variance is a multiple of that of a control arm.
Prints Markdown tables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from referee.pages.document import Table, markdown_table
from referee.verdict.design import MARGIN
from referee.verdict.looks import FIRST_SHARE, nominal_levels
from referee.verdict.statistics import t_quantile
from runtime.errors import run_command
from study.analysis.verdict import LEVEL, SQUARE, variance_check

SIGMA = 0.007  # nats between control arms at one seed, about that of the default CPU study
NOISES = ("normal", "t with 3 dof")
RATIOS = (1, 4, 10)
SEEDS = (3, 5, 9)
LOOKS = ((3, 6), (5, 10), (3, 6, 9), (5, 6, 7, 8, 9), tuple(range(3, 13)), tuple(range(3, 31, 3)))
PERCENT = (0.5, 1.0, 2.0, 3.0)  # true changes of perplexity
PLANS = ((3,), (5,), (6,), (9,), (10,), (3, 6), (5, 10))
Values = NDArray[np.float64]


def differences(
    draw: np.random.Generator,
    studies: int,
    seeds: int,
    ratio: float = 1.0,
    noise: str = NOISES[0],
    variants: int = 1,
) -> Values:
    """Return the differences of variants without effect to the mean of the control arms: variant, study, seed."""
    shape = (len(SQUARE) + variants, studies, seeds)
    values = draw.normal(size=shape) if noise == NOISES[0] else draw.standard_t(3, size=shape) / math.sqrt(3)
    found: Values = SIGMA * (math.sqrt(ratio) * values[len(SQUARE) :] - values[: len(SQUARE)].mean(axis=0))
    return found


@dataclass(frozen=True)
class Judged:
    """Each study at the last look. called: better or worse. half: of the interval (nats). equivalent: if not called."""

    mean: Values
    half: Values
    called: NDArray[np.bool_]
    equivalent: NDArray[np.bool_]


def judge_all(values: Values, looks: Sequence[int], level: float = LEVEL) -> Judged:
    """Apply the rule of study.analysis.verdict.judge to many studies (study, seed) at the last of these looks."""
    seeds = looks[-1]
    used = values[:, :seeds]
    mean, error = used.mean(axis=1), used.std(axis=1, ddof=1) / math.sqrt(seeds)
    half, narrow = (
        t_quantile(1 - nominal_levels(tuple(looks), one)[-1], seeds - 1) * error for one in (level, 2 * level)
    )
    called = np.abs(mean) > half
    return Judged(mean, half, called, ~called & (np.abs(mean) + narrow < MARGIN))


def any_look(values: Values, looks: Sequence[int], level: float = LEVEL) -> NDArray[np.bool_]:
    """Return whether any look calls the study."""
    called = [judge_all(values, looks[: k + 1], level).called for k in range(len(looks))]
    found: NDArray[np.bool_] = np.any(called, axis=0)
    return found


def percent(shares: NDArray[np.bool_]) -> str:
    return f"{100 * float(np.mean(shares)):.1f}"


def calibration(studies: int) -> list[list[str]]:
    """Without an effect, at the planned seeds."""
    rows = [
        [
            "noise",
            "variance ratio",
            "seeds",
            "better or worse, %",
            "interval contains zero, %",
            "equivalent, %",
        ]
    ]
    for noise in NOISES:
        for ratio in RATIOS:
            for seeds in SEEDS:
                draw = np.random.default_rng([1, NOISES.index(noise), ratio, seeds])
                found = judge_all(differences(draw, studies, seeds, ratio, noise)[0], (seeds,))
                shares = (found.called, np.abs(found.mean) <= found.half, found.equivalent)
                rows.append([noise, str(ratio), str(seeds), *map(percent, shares)])
    return rows


def repeated(studies: int) -> list[list[str]]:
    """Without an effect, at several looks: the share of studies that any look calls."""
    columns = [f"{noise}, ratio {ratio}" for noise in NOISES for ratio in (1, 10)]
    rows = [["looks at seeds", *(f"{column}, %" for column in columns), "plain t at each look, %"]]
    for looks in LOOKS:
        cells = []
        for noise in NOISES:
            for ratio in (1, 10):
                draw = np.random.default_rng([2, len(looks), looks[-1], NOISES.index(noise), ratio])
                values = differences(draw, studies, looks[-1], ratio, noise)[0]
                cells.append(percent(any_look(values, looks)))
                if len(cells) == 1:
                    each = [judge_all(values, (seeds,), LEVEL / FIRST_SHARE).called for seeds in looks]
                    plain = percent(np.any(each, axis=0))
        rows.append([", ".join(map(str, looks)), *cells, plain])
    return rows


def family(studies: int) -> list[list[str]]:
    """Four variants without effect against the same control arms: one primary and three exploratory."""
    rows = [
        ["looks at seeds", "primary, %", "any exploratory, %", "any of the four, %", "four exploratory, %"]
    ]
    for looks in ((3,), (5,), (9,), (3, 6, 9)):
        values = differences(np.random.default_rng([3, *looks]), studies, looks[-1], variants=4)
        primary = any_look(values[0], looks)
        others = np.any([any_look(one, looks, LEVEL / 3) for one in values[1:]], axis=0)
        together = np.any([any_look(one, looks, LEVEL / 4) for one in values], axis=0)
        shares = (primary, others, primary | others, together)
        rows.append([", ".join(map(str, looks)), *map(percent, shares)])
    return rows


def equivalence(studies: int) -> list[list[str]]:
    """Share of studies that any look calls equivalent within 1 %: an error at a true change of 1 %, right at 0."""
    rows = [
        [
            "looks at seeds",
            "ratio 1, true 1 %",
            "ratio 10, true 1 %",
            "t with 3 dof, true 1 %",
            "ratio 1, true 0",
        ]
    ]
    for looks in ((3,), (5,), (9,), (15,), (5, 10), tuple(range(3, 13))):
        cells = []
        for ratio, noise, effect in ((1, 0, MARGIN), (10, 0, MARGIN), (1, 1, MARGIN), (1, 0, 0.0)):
            draw = np.random.default_rng([4, len(looks), looks[-1], ratio, noise])
            values = differences(draw, studies, looks[-1], ratio, NOISES[noise])[0] + effect
            said = [judge_all(values, looks[: k + 1]).equivalent for k in range(len(looks))]
            cells.append(percent(np.any(said, axis=0)))
        rows.append([", ".join(map(str, looks)), *cells])
    return rows


def power(studies: int) -> list[list[str]]:
    """Share of studies whose last look is called, and how many times too large the called estimates are."""
    head = [f"{one:g} %: called, %" for one in PERCENT] + [f"{one:g} %: exaggeration" for one in PERCENT]
    rows = [["looks at seeds", "level, %", *head, "wrong sign, %"]]
    for looks in PLANS:
        called, larger, wrong = [], [], 0.0
        for one in PERCENT:
            effect = math.log1p(one / 100)
            draw = np.random.default_rng([5, looks[-1], round(10 * one)])
            found = judge_all(differences(draw, studies, looks[-1])[0] + effect, looks)
            sizes = np.abs(found.mean[found.called]) / effect
            called.append(percent(found.called))
            larger.append(f"{sizes.mean():.2f}" if sizes.size >= 20 else "-")
            wrong = max(wrong, float(np.mean(found.called & (found.mean < 0))))
        level = f"{100 * nominal_levels(looks)[-1]:.2g}"
        rows.append([", ".join(map(str, looks)), level, *called, *larger, f"{100 * wrong:.2f}"])
    return rows


def correlated(studies: int) -> list[list[str]]:
    """Control arms that agree in pairs, because the late half does little: what it costs, and what the checks see."""
    rows = [
        [
            "seeds",
            "arms",
            "halves against both, %",
            "early against late, %",
            "either, after Holm, %",
            "false verdicts, %",
        ]
    ]
    for seeds in SEEDS:
        for pairs in (False, True):
            draw, alarms = np.random.default_rng([6, seeds, pairs]), np.zeros((studies, 4), bool)
            for study in range(studies):
                shared, single = draw.normal(size=(seeds, 2)), draw.normal(size=(seeds, 5))
                arms = single[:, :4]
                if pairs:
                    arms = math.sqrt(0.75) * shared[:, [0, 1, 0, 1]] + 0.5 * arms
                check = variance_check(
                    {name: dict(enumerate(arms[:, k].tolist())) for k, name in enumerate(SQUARE)}
                )
                assert check is not None
                alarms[study, :2] = [test.p_value < LEVEL for test in check.tests]
                alarms[study, 2] = check.differs
                values = SIGMA * (single[:, 4] - arms.mean(axis=1))[None]
                alarms[study, 3] = judge_all(values, (seeds,)).called[0]
            shares = [percent(alarms[:, column]) for column in range(4)]
            rows.append([str(seeds), "correlated in pairs" if pairs else "independent", *shares])
    return rows


def main() -> int:
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for table in (calibration, repeated, family, equivalence, power, correlated):
        count = studies // 10 if table is correlated else studies
        head, *rows = table(count)
        print(
            f"\n{table.__doc__} {count:,} studies a cell.\n",
            markdown_table(Table(head, rows)),
            sep="\n",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run_command(main)
