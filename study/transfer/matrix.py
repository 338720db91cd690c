"""Collect the evaluations of finished runs on platforms, and judge them. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.system.errors import UserError
from study.analysis.verdict import MARGIN
from study.records import plan_file
from study.records.lengths import shown_length
from study.records.runs import Run, losses, read_runs
from study.stats.statistics import mean
from study.sweep.rates import FIRST_TUNING_SEED
from study.transfer.records import HOMES, read
from study.transfer.verdicts import TransferVerdicts, judge_transfer, without_noise

FIFTHS = 5
SHARED = ("model", "data", "tokenizer", "validation")  # of the fingerprint


class TransferError(UserError, RuntimeError):
    """The studies have no runs that can be compared over platforms."""


@dataclass(frozen=True)
class MatrixRow:
    """The loss (nats per token) of a run on a platform."""

    study: str
    run: str
    arm: str
    seed: int
    platform: str
    loss: float


@dataclass(frozen=True)
class Disruption:
    """Validation loss with noise minus without (nats) at each fifth of training: the mean over seeds."""

    arm: str
    differences: tuple[float | None, ...]


@dataclass(frozen=True)
class TransferReport:
    """home: the platform of training. missing: evaluations that do not exist yet. margin: in nats."""

    studies: list[str]
    home: str
    platforms: list[str]
    matrix: list[MatrixRow]
    verdicts: TransferVerdicts
    disruptions: list[Disruption]
    missing: list[str]
    margin: float

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.matrix))

    def mean_loss(self, arm: str, platform: str) -> float | None:
        """Return the mean loss of an arm on a platform over its seeds; None without one."""
        found = [row.loss for row in self.matrix if (row.arm, row.platform) == (arm, platform)]
        return mean(found) if found else None


def counted_runs(studies: Sequence[Path]) -> list[tuple[Path, Run]]:
    """Return the counted runs with their study's folder, tuning runs left out. TransferError without one."""
    found = [
        (study, run)
        for study in studies
        for run in read_runs(study, shown_length(study).length)
        if run.used and run.record.seed < FIRST_TUNING_SEED
    ]
    if not found:
        named = " ".join(map(str, studies))
        raise TransferError(f"{named} has no finished run; fix: run `make` until a run is finished")
    first = found[0][1].record.fingerprint
    for study, run in found:
        theirs = run.record.fingerprint
        differing = [name for name in SHARED if getattr(first, name) != getattr(theirs, name)]
        if differing:
            raise TransferError(
                f"{study}/runs/{run.name} differs in {', '.join(differing)} from {found[0][1].name}; fix: name studies "
                "of one model and one text"
            )
    names = [(run.variant, run.seed) for _, run in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise TransferError(
            f"{twice[0]} with seed {twice[1]} is in two studies; fix: name studies of different arms"
        )
    return found


def home_of(run: Run) -> str:
    """Return the platform of training."""
    return HOMES.get(run.record.target.dtype, "fp32")


def build_transfer(studies: Sequence[Path], platforms: Sequence[str]) -> TransferReport:
    """Read the evaluations of every counted run on its home platform and on `platforms`, and judge them."""
    runs = counted_runs(studies)
    homes = {home_of(run) for _, run in runs}
    if len(homes) > 1:
        raise TransferError(
            f"the runs were trained in {' and '.join(sorted(homes))}; fix: name studies of one format"
        )
    home = homes.pop()
    names = [home, *(name for name in dict.fromkeys(platforms) if name != home)]
    matrix, missing = [], []
    for study, run in runs:
        for name in names:
            record = read(study / "runs" / run.name, name)
            if record is None:
                missing.append(f"{run.name} on {name}")
            else:
                matrix.append(
                    MatrixRow(study.name, run.name, run.variant, run.record.seed, name, record.loss)
                )
    table: dict[str, dict[str, dict[int, float]]] = {name: {} for name in names}
    for row in matrix:
        table[row.platform].setdefault(row.arm, {})[row.seed] = row.loss
    plan = plan_file.read(studies[0])
    margin = plan.equivalence_margin if plan else MARGIN
    verdicts = judge_transfer(table, home, margin)
    return TransferReport(
        studies=[study.name for study in studies],
        home=home,
        platforms=names,
        matrix=matrix,
        verdicts=verdicts,
        disruptions=_disruptions([run for _, run in runs]),
        missing=missing,
        margin=margin,
    )


def _disruptions(runs: Sequence[Run]) -> list[Disruption]:
    """Compare each noisy arm with its arm without noise at the evaluation nearest to each fifth of training."""
    found = []
    for arm in dict.fromkeys(run.variant for run in runs if without_noise(run.variant)):
        differences: list[list[float]] = [[] for _ in range(FIFTHS)]
        for run in (run for run in runs if run.variant == arm):
            base = next(
                (one for one in runs if (one.variant, one.seed) == (without_noise(arm), run.seed)), None
            )
            shared = sorted(losses(run.record).keys() & losses(base.record).keys()) if base else []
            if base is None or len(shared) < FIFTHS:
                continue
            for fifth in range(FIFTHS):
                tokens = min(shared, key=lambda at: abs(at - shared[-1] * (fifth + 1) / FIFTHS))
                differences[fifth].append(losses(run.record)[tokens] - losses(base.record)[tokens])
        found.append(Disruption(arm, tuple(mean(one) if one else None for one in differences)))
    return [one for one in found if any(value is not None for value in one.differences)]


def as_json(report: TransferReport) -> dict[str, Any]:
    """The report as plain data: `matrix` has a row for each run and platform, `verdicts` the three questions."""
    return {"schema": 1} | dataclasses.asdict(report)
