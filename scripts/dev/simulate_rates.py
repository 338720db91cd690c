"""Simulate studies that tune learning rates: how often a control arm wins or loses by tuning, and power.

    python -m scripts.dev.simulate_rates [STUDIES]    100,000 studies a cell by default: a minute on one core

The loss of a run is that of its rate plus noise of one unit; the shift that all runs of a seed share drops out of the
differences. All losses are in units of the noise. Prints Markdown tables.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpt2.system.errors import run_command
from pages.document import Table, markdown_table
from scripts.dev.simulate_verdicts import Judged, Values, judge_all, percent

DESIGNS = ((1, 2, 3), (1, 2, 5), (1, 2, 9), (4, 2, 5), (4, 4, 9))  # control arms, tuning seeds, judged seeds
DEPTHS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # loss of the outer rates above the middle one
GRIDS = (1, 2, 3, 5, 9)  # numbers of rates


@dataclass(frozen=True)
class Arms:
    """Losses of many studies. controls: means of the control arms. shape: study, rate, seed."""

    controls_tuning: Values
    variant_tuning: Values
    controls: Values
    variant: Values


def draw_arms(
    draw: np.random.Generator,
    studies: int,
    design: tuple[int, int, int],
    curve: Values,
    effect: Values | float = 0.0,
) -> Arms:
    """Draw tuning and judged losses. curve: of the control arms by rate. effect: of the variant, by rate."""
    arms, tuning, seeds = design
    level = curve[None, :, None]

    def losses(shift: Values, spread: float, number: int) -> Values:
        found: Values = shift + spread * draw.normal(size=(studies, curve.size, number))
        return found

    moved = level + np.broadcast_to(effect, curve.shape)[None, :, None]
    share = 1 / math.sqrt(arms)
    return Arms(
        losses(level, share, tuning),
        losses(moved, 1, tuning),
        losses(level, share, seeds),
        losses(moved, 1, seeds),
    )


def best_rates(tuning: Values) -> NDArray[np.intp]:
    """Return the rate of each study: the lowest mean loss over the tuning seeds."""
    found: NDArray[np.intp] = tuning.mean(axis=2).argmin(axis=1)
    return found


@dataclass(frozen=True)
class Rules:
    """Each study: +1 better, -1 worse, 0 neither. differ: the arms have different rates.

    rule: of the report. at_best: a test at the best rates alone. common: all at the rate of the control arms.
    """

    differ: NDArray[np.bool_]
    rule: NDArray[np.int_]
    at_best: NDArray[np.int_]
    common: NDArray[np.int_]


def apply_rules(arms: Arms) -> Rules:
    """Choose the rates on the tuning seeds, and judge on the others."""
    own, shared = best_rates(arms.variant_tuning), best_rates(arms.controls_tuning)
    at_best = called(at(arms.variant, own) - at(arms.controls, shared))
    same = called(at(arms.variant, own) - at(arms.controls, own))
    common = called(at(arms.variant, shared) - at(arms.controls, shared))
    confirmed = ((at_best == 1) & (same == 1)) | ((at_best == -1) & (common == -1))
    return Rules(own != shared, np.where(confirmed, at_best, 0), at_best, common)


def at(values: Values, rates: NDArray[np.intp]) -> Values:
    """Return the losses (study, seed) of each study at its rate."""
    found: Values = values[np.arange(values.shape[0]), rates]
    return found


def called(differences: Values) -> NDArray[np.int_]:
    """Return +1 where the rule of study.analysis.verdict.judge calls the variant better, -1 for worse, else 0."""
    judged: Judged = judge_all(differences, (differences.shape[1],))
    found: NDArray[np.int_] = np.where(judged.called, -np.sign(judged.mean), 0).astype(int)
    return found


def naive(arms: Arms, baseline: int) -> NDArray[np.int_]:
    """Judge the variant at its best rate on the judged seeds against control arms at one rate, `baseline`."""
    return called(at(arms.variant, best_rates(arms.variant)) - arms.controls[:, baseline])


def valley(rates: int, depth: float) -> Values:
    """Return a curve of loss over rates: 0 at the middle rate, `depth` more for each rate beside it."""
    found: Values = depth * np.abs(np.arange(rates) - rates // 2.0)
    return found


def without_effect(studies: int) -> list[list[str]]:
    """A variant that is in truth a control arm, three rates: the share of studies that call it better or worse."""
    rows = [[
        "control arms, tuning seeds, seeds", "outer rates", "rates differ, %", "better, %", "worse, %",
        "best rates alone: better, %", "best rates alone: worse, %", "one rate: better, %", "one rate: worse, %",
    ]]  # fmt: skip
    for design in DESIGNS:
        for depth in DEPTHS:
            draw = np.random.default_rng([1, *design, round(10 * depth)])
            found = apply_rules(draw_arms(draw, studies, design, valley(3, depth)))
            shares = [found.differ]
            shares += [
                words == sign for words in (found.rule, found.at_best, found.common) for sign in (1, -1)
            ]
            rows.append([", ".join(map(str, design)), f"+{depth:g}", *map(percent, shares)])
    return rows


def naive_rule(studies: int) -> list[list[str]]:
    """The naive rule, 5 seeds and one control arm: the variant has its best rate on the judged seeds, the baseline one.

    The variant is in truth a control arm.
    """
    rows = [["rates", "baseline at the best rate, flat: better, %", "worse, %",
             *(f"baseline {depth:g} above its best: better, %" for depth in DEPTHS[1:])]]  # fmt: skip
    for rates in GRIDS:
        cells = []
        for depth in DEPTHS:
            draw = np.random.default_rng([2, rates, round(10 * depth)])
            curve = np.where(np.arange(rates) == 0, depth, 0.0)
            words = naive(draw_arms(draw, studies, (1, 2, 5), curve), 0)
            cells += [words == 1, words == -1] if not depth else [words == 1]
        rows.append([str(rates), *map(percent, cells)])
    return rows


def power(studies: int) -> list[list[str]]:
    """A variant that is better at its best rate by 2 or 4 units: the share of studies that call it better."""
    rows = [["control arms, tuning seeds, seeds", "effect", "best rate of the variant", "rates differ, %",
             "better, %", "best rates alone: better, %", "one rate: better, %"]]  # fmt: skip
    for design in DESIGNS:
        for effect in (2.0, 4.0):
            for place, name in ((0, "the same"), (1, "the next one")):
                draw = np.random.default_rng([3, *design, round(effect), place])
                curve = valley(5, 3.0)
                moved = np.roll(curve, place) - curve - effect
                found = apply_rules(draw_arms(draw, studies, design, curve, moved))
                shares = [found.differ, *(words == 1 for words in (found.rule, found.at_best, found.common))]
                rows.append([", ".join(map(str, design)), f"-{effect:g}", name, *map(percent, shares)])
    return rows


def main() -> int:
    studies = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for table in (without_effect, naive_rule, power):
        head, *rows = table(studies)
        print(f"\n{inspect.getdoc(table)}\n\n{markdown_table(Table(head, rows))}", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
