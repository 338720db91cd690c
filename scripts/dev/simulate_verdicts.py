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
from pages.document import Table, markdown_table
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
    counts = np.zeros(4)
    for _ in range(studies):
        losses = 4.0 + SEED_SIGMA * draw.normal(size=(seeds, 1)) + SIGMA * draw.normal(size=(seeds, 5)) * [
            1, 1, 1, 1, math.sqrt(ratio)
        ]  # fmt: skip
        losses[:, 4] += effect
        columns = zip((*CONTROLS, "RALEARN"), losses.T.tolist(), strict=True)
        (verdict,) = judge({name: dict(enumerate(column)) for name, column in columns})
        low, high = verdict.test.difference.low, verdict.test.difference.high
        assert low is not None
        assert high is not None
        wrong = verdict.word == (WORSE if effect < 0 else BETTER) and effect != 0
        decided = verdict.word in (BETTER, WORSE)
        counts += [decided, low <= effect <= high, verdict.word == EQUIVALENT, wrong]
    return Rates(*(counts / studies).tolist())


def calibration(studies: int) -> list[list[str]]:
    """The table of false positives and coverage without an effect."""
    head = [
        "variance ratio",
        "seeds",
        "better or worse, %",
        "interval contains zero, %",
        "equivalent within 1 %, %",
    ]
    rows = [head]
    for ratio in RATIOS:
        for seeds in SEEDS:
            rates = simulate(studies, seeds, ratio)
            shares = (rates.decided, rates.covered, rates.equivalent)
            rows.append([str(ratio), str(seeds), *(f"{100 * share:.1f}" for share in shares)])
    return rows


def power(studies: int) -> list[list[str]]:
    """The table of power where the variant varies like the control arms."""
    rows = [["seeds", *(f"{perplexity_percent(effect):.1f} %" for effect in EFFECTS), "wrong sign"]]
    for seeds in POWER_SEEDS:
        cells = [simulate(studies, seeds, 1.0, effect) for effect in EFFECTS]
        worst = max(rates.wrong_sign for rates in cells)
        rows.append([str(seeds), *(f"{100 * rates.decided:.1f}" for rates in cells), f"{100 * worst:.2f}"])
    return rows


def main() -> int:
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"{studies:,} studies a cell, {SIGMA} nats between control arms at one seed")
    for head, *rows in (calibration(studies), power(studies)):
        print("", markdown_table(Table(head, rows)), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
