"""From a loss table to the numbers and words that are pinned: the only file of these pins that calls the product.

Its calls follow the product; the rows that it returns stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from referee.verdict.design import Design
from referee.verdict.statistics import noise_floor
from study.analysis.verdict import Verdict, control_losses, earlier_verdicts, judge, judge_tuned, odd_controls
from study.compare.compare_sizes import trends
from study.evaluation.transfer_matrix import TransferVerdict, TransferVerdicts, judge_transfer
from tests.pins.loss_tables import PARAMETERS, SIZES, LossTable, Table, loss_tables
from tests.pins.pinned import Row

GRPO_ARMS = {
    "B": "baseline",
    "B+AQN=mild": "mild",
    "B+AQN=qerl": "qerl",
    "B+AQN=strong": "strong",
}  # name of a row
EVERY = 8  # of the tables: through the questions beyond judge and trends


def all_rows() -> Iterator[Row]:
    """Return the rows of every table, and of every three tables as three sizes of one study."""
    verdicts: list[list[Verdict]] = []
    for table in loss_tables():
        verdicts.append(judge(table.losses, table.margin, table.primary, table.looks, table.finished))
        yield from rows_of(f"{table.number}", table, verdicts[-1])
        if len(verdicts) == SIZES:
            yield from trend_rows(f"{table.number}", verdicts)
            verdicts = []


def rows_of(key: str, table: LossTable, judged: list[Verdict]) -> Iterator[Row]:
    losses = table.losses
    floor = noise_floor(control_losses(losses))
    yield Row(f"{key} controls", " ".join(odd_controls(losses)), (floor and floor.sigma, floor and floor.dof))
    yield from judge_rows(f"{key} judge", judged)
    for one in earlier_verdicts(losses, table.margin, table.primary, table.looks):
        name = f"{key} look {one.looks[-1]} {one.variant}"
        yield Row(name, one.word, (one.adjusted_p, one.equivalence_p, one.level))
    if table.number % EVERY == 0:
        yield from transfer_rows(f"{key} transfer", table_transfer(table))
        yield from rate_rows(f"{key} rates", table)
        yield from grpo_rows(f"{key} grpo", table)


def judge_rows(key: str, verdicts: Iterable[Verdict]) -> Iterator[Row]:
    for one in verdicts:
        test, difference = one.test, one.test.difference
        numbers = (difference.mean, difference.low, test.narrow.high, test.spread, test.p_value, one.adjusted_p,
                   one.equivalence_p, one.level, one.callable_from, one.exaggeration)  # fmt: skip
        counts = f"{one.seeds}/{one.finished}/{one.planned} of {one.judged_together}"
        yield Row(f"{key} {one.variant} {one.role} {counts}", one.word, numbers)


def trend_rows(key: str, by_size: list[list[Verdict]]) -> Iterator[Row]:
    for one in trends(PARAMETERS, by_size):
        slope = one.contrast
        numbers = slope and (slope.slope.mean, slope.slope.low, slope.dof, slope.p_value, one.adjusted_p)
        yield Row(f"{key} trend {one.arm} {one.role}", one.word, numbers or ())


def table_transfer(table: LossTable) -> TransferVerdicts:
    """Judge a study with noise: every arm without, and some with."""

    def both(plain: Table, noisy: Table) -> Table:
        return plain | {f"{arm}+AQN=mild": by_seed for arm, by_seed in noisy.items()}

    away = {name: both(*tables) for name, tables in table.platforms.items()}
    return judge_transfer(
        {"fp32": both(table.losses, table.noisy)} | away, "fp32", table.margin, table.diverged
    )


def transfer_rows(key: str, found: TransferVerdicts) -> Iterator[Row]:
    questions: tuple[tuple[str, list[TransferVerdict]], ...] = (
        ("gap", found.gaps), ("shrinks", found.shrinks), ("costs", found.costs),
    )  # fmt: skip
    for question, answers in questions:
        for one in answers:
            numbers = (one.test.difference.mean, one.test.difference.low, one.p_value, one.p_outside)
            yield Row(f"{key} {question} {one.platform} {one.arm}", one.word, numbers)


def rate_rows(key: str, table: LossTable) -> Iterator[Row]:
    """Judge each arm at its learning rate, at that of the control arms, and against controls at its rate."""
    losses = {f"{name}+LR=1e-3": table.losses[name] for name in table.controls}
    arms = {name: f"{name}+LR={place}e-3" for place, name in enumerate(table.at_their_rate, 2)}
    for name, at_its_rate in arms.items():
        rate = at_its_rate.removeprefix(name)
        losses |= {at_its_rate: table.losses[name], f"{name}+LR=1e-3": table.at_common_rate[name]}
        losses |= {f"{other}{rate}": by_seed for other, by_seed in table.at_their_rate[name].items()}
    design = Design(
        controls=tuple(f"{name}+LR=1e-3" for name in table.controls),
        arms=tuple(arms.values()),
        primary=arms.get(table.primary, ""),
        seeds=(0,),
        looks=(),
        margin=table.margin,
    )
    looks, finished = (
        {arms[name]: value for name, value in values.items()} for values in (table.looks, table.finished)
    )
    tuned = judge_tuned(losses, design, looks, finished)
    bare = {at_its_rate: name for name, at_its_rate in arms.items()}
    yield from (Row(f"{key} confirmed {bare[one.variant]}", one.word, ()) for one in tuned.best)
    for one in tuned.same:
        yield Row(f"{key} same {bare[one.variant]}", one.word, (one.test.difference.mean, one.adjusted_p))


def grpo_rows(key: str, table: LossTable) -> Iterator[Row]:
    """Judge accuracies on 1,024 problems: half a point less for a loss of 0.005 nats more.

    The rows have the difference of errors in percentage points.
    """
    arms = dict(zip(GRPO_ARMS, (table.controls[0], *table.at_common_rate), strict=False))
    seeds = sorted(set(chain.from_iterable(table.losses.values())))
    lost = {name for name, arm in arms.items() if table.diverged.get(arm)}

    def right(loss: float) -> float:
        return 100 * min(max(round(1024 * (4.5 - loss)), 0), 1024) / 1024

    accuracies = {
        name: {seed: right(loss) for seed, loss in table.losses[arm].items()}
        for name, arm in arms.items()
        if name not in lost and table.losses[arm]
    }
    looks = (3, len(seeds)) if len(seeds) > 3 else (max(len(seeds), 1),)
    control = accuracies.get("B", {})
    verdicts = judge(
        accuracies,
        100 * table.margin,
        looks=dict.fromkeys(accuracies, looks),
        finished={name: len(by_seed.keys() & control.keys()) for name, by_seed in accuracies.items()},
        higher=True,
    )
    found = {one.variant: one for one in verdicts}
    for name in arms:
        one = found.get(name)
        word = "diverged" if name in lost else one.word if one else ""
        numbers = one and (-one.test.difference.mean, one.adjusted_p, one.equivalence_p)
        yield Row(f"{key} {GRPO_ARMS[name]}", word, numbers or ())
