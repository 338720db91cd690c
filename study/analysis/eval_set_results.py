"""The held-out texts of a study from its records: losses by arm, differences to the control arms. Needs no torch.

Runs count for a text if they were evaluated on the same tokens as most runs. The others are named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ra.arms import parse_arm
from referee.verdict.statistics import Interval, mean, mean_interval
from runtime.run_record import EvalSetEntry
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
    """A text with its arms. left_out: the runs that were evaluated on another text of this name."""

    name: str
    documents: int
    tokens: int
    words: int
    bytes: int
    text_sha256: str
    tokens_sha256: str
    rows: list[EvalSetRow]
    left_out: list[str]

    def by_word(self, loss: float) -> float:
        """Return nats per word of a loss in nats per token."""
        return loss * self.tokens / self.words

    def bits_per_byte(self, loss: float) -> float:
        """Return bits per byte of a loss in nats per token."""
        return loss * self.tokens / (self.bytes * math.log(2))


@dataclass
class EvalSets:
    """The texts of a study."""

    tables: list[EvalSetTable]


def eval_set_tables(runs: Sequence[Run]) -> EvalSets:
    """Return a table for each text that one of the runs was evaluated on, in the order of their first run."""
    found = {run.name: run.record.eval_sets or {} for run in runs}
    names = dict.fromkeys(name for entries in found.values() for name in entries)
    tables = [
        _table(name, runs, {run: one[name] for run, one in found.items() if name in one}) for name in names
    ]
    return EvalSets([table for table in tables if table.rows])


def _table(name: str, runs: Sequence[Run], entries: dict[str, EvalSetEntry]) -> EvalSetTable:
    """Return the table of the text that most runs were evaluated on, or the first of equals."""
    usual = Counter(entry.tokens_sha256 for entry in entries.values()).most_common(1)[0][0]
    same = {
        run: entry
        for run, entry in entries.items()
        if entry.tokens_sha256 == usual and entry.loss is not None
    }
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.name in same and run.seed is not None:
            losses.setdefault(run.variant, {})[run.seed] = same[run.name].loss or 0.0
    text = next(entry for entry in entries.values() if entry.tokens_sha256 == usual)
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
        text.documents,
        text.tokens,
        text.words,
        text.bytes,
        text.text_sha256,
        text.tokens_sha256,
        rows,
        [run for run, entry in entries.items() if entry.tokens_sha256 != usual],
    )


def _against_controls(losses: Losses, variant: str) -> Interval | None:
    """Return the arm minus the mean of the control arms, paired by seed; None without a common seed."""
    seeds = sorted(losses[variant])
    pairs = zip(seeds, control_losses(losses, seeds, variant), strict=True)
    differences = [losses[variant][seed] - mean(arms) for seed, arms in pairs if arms]
    return mean_interval(differences) if differences else None
