"""The held-out texts of a study from its rows: losses by arm, differences to the control arms.

Runs count for a text if they were evaluated on the same text as most runs. The others are named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ra.arms import parse_arm
from referee.verdict.rows import LOSS
from referee.verdict.statistics import Interval, mean, mean_interval
from study.analysis.verdict import Losses, control_losses
from study.runs import Run, variant_order


@dataclass
class EvalSetRow:
    """One arm on a text. loss: mean nats per token over its seeds. runs: those that were evaluated on this text.

    against_controls: nats per token, paired by seed, minus the mean of the control arms; None for a control arm.
    """

    variant: str
    control: bool
    runs: int
    of: int
    loss: Interval
    against_controls: Interval | None


@dataclass
class EvalSetTable:
    """A text with its arms. digest: of the text. left_out: the runs that were evaluated on another of this name."""

    name: str
    digest: str
    documents: int
    tokens: int
    words: int
    bytes: int
    rows: list[EvalSetRow]
    left_out: list[str]

    def by_word(self, loss: float) -> float:
        """Return nats per word of a loss in nats per token."""
        return loss * self.tokens / self.words

    def bits_per_byte(self, loss: float) -> float:
        """Return bits per byte of a loss in nats per token."""
        return loss * self.tokens / (self.bytes * math.log(2))


def evaluated_texts(run: Run) -> dict[str, str]:
    """Return the names of the texts that a run was evaluated on, with their data."""
    return {row.dataset: row.data for row in run.rows if row.metric == "words"}


def eval_set_tables(runs: Sequence[Run]) -> list[EvalSetTable]:
    """Return a table for each text that one of the runs was evaluated on, in the order of their first run."""
    names = dict.fromkeys(name for run in runs for name in evaluated_texts(run))
    tables = [_table(name, runs) for name in names]
    return [table for table in tables if table.rows]


def _table(name: str, runs: Sequence[Run]) -> EvalSetTable:
    """Return the table of the text that most runs were evaluated on, or the first of equals."""
    texts = {run.name: evaluated_texts(run).get(name) for run in runs}
    usual = Counter(data for data in texts.values() if data).most_common(1)[0][0]
    found = {run.name: {row.metric: row.value for row in run.rows if row.data == usual} for run in runs}
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        if LOSS in found[run.name]:
            losses.setdefault(run.variant, {})[run.record.seed] = found[run.name][LOSS]
    counts = next(values for values in found.values() if values)
    rows = [
        EvalSetRow(
            variant,
            parse_arm(variant).is_control,
            len(losses[variant]),
            sum(run.variant == variant for run in runs),
            mean_interval(list(losses[variant].values())),
            None if parse_arm(variant).is_control else _against_controls(losses, variant),
        )
        for variant in sorted(losses, key=variant_order)
    ]
    return EvalSetTable(
        name,
        usual.partition("@")[2],
        **{name: int(counts[name]) for name in ("documents", "tokens", "words", "bytes")},
        rows=rows,
        left_out=[run for run, data in texts.items() if data not in (usual, None)],
    )


def _against_controls(losses: Losses, variant: str) -> Interval | None:
    """Return the arm minus the mean of the control arms, paired by seed; None without a common seed."""
    seeds = sorted(losses[variant])
    pairs = zip(seeds, control_losses(losses, seeds, variant), strict=True)
    differences = [losses[variant][seed] - mean(arms) for seed, arms in pairs if arms]
    return mean_interval(differences) if differences else None
