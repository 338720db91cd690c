"""Simulate studies and judge each by the function that the report calls: false positives, coverage, power.

    python -m scripts.dev.simulate_verdicts [STUDIES]    10,000 studies a cell by default: minutes on one core

A study: B, RAEARLY, RALATE, RAALL and RALEARN at S seeds. Losses differ by 0.05 nats between seeds and by SIGMA
between runs of one seed; RALEARN's variance is a multiple of that. Prints Markdown tables.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from gpt2.system.errors import run_command
from study.analysis.verdict import BETTER, EQUIVALENT, WORSE, judge
from study.stats.statistics import perplexity_percent

CONTROLS = ("B", "RAEARLY", "RALATE", "RAALL")
SIGMA = 0.007  # nats between control arms at one seed, about that of the default CPU study
SEED_SIGMA = 0.05  # nats between seeds
RATIOS = (1, 4, 10)
SEEDS = (3, 4, 5, 6, 7, 8, 9)
EFFECTS = (0.01, 0.02, 0.03)  # nats: about 1, 2 and 3 % of perplexity
POWER_SEEDS = (3, 5, 7)


@dataclass(frozen=True)
class Rates:
    """Shares of studies. covered: the 95 % interval contains the true effect. wrong_sign: the verdict has it wrong."""

    decided: float
    covered: float
    equivalent: float
    wrong_sign: float


def simulate(studies: int, seeds: int, ratio: float = 1.0, effect: float = 0.0, seed: int = 0) -> Rates:
    """Judge `studies` studies. ratio: RALEARN's variance over a control arm's. effect: RALEARN's, in nats."""
    cell = [seed, seeds, round(10 * ratio), round(1000 * abs(effect)), *([1] if effect < 0 else [])]
    draw = np.random.default_rng(cell)
    decided = covered = equivalent = wrong_sign = 0
    for _ in range(studies):
        losses = 4.0 + SEED_SIGMA * draw.normal(size=(seeds, 1)) + SIGMA * draw.normal(size=(seeds, 5)) * [
            1, 1, 1, 1, math.sqrt(ratio)
        ]  # fmt: skip
        losses[:, 4] += effect
        table = {
            name: dict(enumerate(column))
            for name, column in zip((*CONTROLS, "RALEARN"), losses.T.tolist(), strict=True)
        }
        (verdict,) = judge(table)
        interval = verdict.test.difference
        assert interval.low is not None
        assert interval.high is not None
        decided += verdict.word in (BETTER, WORSE)
        covered += interval.low <= effect <= interval.high
        equivalent += verdict.word == EQUIVALENT
        wrong_sign += verdict.word == (WORSE if effect < 0 else BETTER) and effect != 0
    return Rates(*(count / studies for count in (decided, covered, equivalent, wrong_sign)))


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def calibration(studies: int) -> list[str]:
    """The table of false positives and coverage without an effect."""
    lines = [
        "| variance ratio | seeds | better or worse, % | interval contains zero, % | equivalent within 1 %, % |"
    ]
    lines.append("|---|---|---|---|---|")
    for ratio in RATIOS:
        for seeds in SEEDS:
            rates = simulate(studies, seeds, ratio)
            cells = (percent(rates.decided), percent(rates.covered), percent(rates.equivalent))
            lines.append(f"| {ratio} | {seeds} | {' | '.join(cells)} |")
    return lines


def power(studies: int) -> list[str]:
    """The table of power where the variant varies like the control arms."""
    effects = " | ".join(f"{perplexity_percent(effect):.1f} %" for effect in EFFECTS)
    lines = [f"| seeds | {effects} | wrong sign |", "|---|---|---|---|---|"]
    for seeds in POWER_SEEDS:
        cells = [simulate(studies, seeds, 1.0, effect) for effect in EFFECTS]
        worst = max(rates.wrong_sign for rates in cells)
        shown = " | ".join(percent(rates.decided) for rates in cells)
        lines.append(f"| {seeds} | {shown} | {100 * worst:.2f} |")
    return lines


def main() -> int:
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"{studies:,} studies a cell, {SIGMA} nats between control arms at one seed\n")
    print("\n".join([*calibration(studies), "", *power(studies)]))
    return 0


if __name__ == "__main__":
    run_command(main)
