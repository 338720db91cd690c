"""Collect the evaluations of finished runs on platforms, and judge them. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from referee.verdict.statistics import mean
from runtime.errors import UserError
from study.analysis.verdict import MARGIN
from study.records import plan_file
from study.records.runs import SHARED, Run, diverged_seeds, losses, read_runs
from study.sweep.rates import FIRST_TUNING_SEED
from study.transfer.records import ItemGap, PlatformRecord, home_platform, item_gap, read, read_at_home
from study.transfer.verdicts import TransferVerdicts, judge_transfer, without_noise

FIFTHS = 5


@dataclass(frozen=True)
class RowItems:
    """HellaSwag of a run on a platform. The gaps are to the home platform, paired by item; None at home."""

    acc: float
    acc_norm: float
    acc_gap: ItemGap | None
    acc_norm_gap: ItemGap | None


@dataclass(frozen=True)
class MatrixRow:
    """The loss (nats per token) of a run on a platform. device: that computed it. hellaswag: None without items."""

    study: str
    run: str
    arm: str
    seed: int
    platform: str
    loss: float
    device: str
    torch: str
    hellaswag: RowItems | None


@dataclass(frozen=True)
class Disruption:
    """Validation loss with noise minus without (nats) at each fifth of training: the mean over seeds."""

    arm: str
    differences: tuple[float | None, ...]


@dataclass(frozen=True)
class TransferReport:
    """home: the platform of training, on device. missing: evaluations that do not exist yet. margin: in nats.

    diverged: arm -> seeds of its runs whose loss was not finite. They are in no mean, and an arm with noise is not
    judged then: its other runs are those that did not diverge.
    """

    studies: list[str]
    home: str
    device: str
    platforms: list[str]
    matrix: list[MatrixRow]
    verdicts: TransferVerdicts
    disruptions: list[Disruption]
    missing: list[str]
    margin: float
    diverged: dict[str, list[int]] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.matrix))

    def mean_loss(self, arm: str, platform: str) -> float | None:
        """Return the mean loss of an arm on a platform over its seeds; None without one."""
        found = [row.loss for row in self.matrix if (row.arm, row.platform) == (arm, platform)]
        return mean(found) if found else None

    def mean_gap(self, arm: str, platform: str) -> float | None:
        """Return the mean over seeds of loss on a platform minus loss at home of the same run; None without one."""
        home = {row.seed: row.loss for row in self.matrix if (row.arm, row.platform) == (arm, self.home)}
        gaps = [
            row.loss - home[row.seed]
            for row in self.matrix
            if (row.arm, row.platform) == (arm, platform) and row.seed in home
        ]
        return mean(gaps) if gaps else None

    def item_gaps(self, arm: str, platform: str) -> list[ItemGap]:
        """Return the gaps in acc_norm of HellaSwag, one a seed."""
        rows = [row for row in self.matrix if (row.arm, row.platform) == (arm, platform)]
        return [row.hellaswag.acc_norm_gap for row in rows if row.hellaswag and row.hellaswag.acc_norm_gap]


def counted_runs(studies: Sequence[Path]) -> list[tuple[Path, Run]]:
    """Return the counted runs with their study's folder, tuning runs left out. UserError without one."""
    found = [
        (study, run)
        for study in studies
        for run in read_runs(study)
        if run.used and run.record.seed < FIRST_TUNING_SEED
    ]
    if not found:
        named = " ".join(map(str, studies))
        raise UserError(f"{named} has no finished run; fix: run `make` until a run is finished")
    first = found[0][1].record.fingerprint
    for study, run in found:
        theirs = run.record.fingerprint
        differing = [name for name in SHARED if getattr(first, name) != getattr(theirs, name)]
        if differing:
            raise UserError(
                f"{study}/runs/{run.name} differs in {', '.join(differing)} from {found[0][1].name}; fix: name studies "
                "of one model, one text and one recipe"
            )
    names = [(run.variant, run.seed) for _, run in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(
            f"{twice[0]} with seed {twice[1]} is in two studies; fix: name studies of different arms"
        )
    return found


def diverged_runs(studies: Sequence[Path]) -> dict[str, list[int]]:
    """Return arm -> seeds of the diverged runs, tuning runs left out."""
    runs = [run for study in studies for run in read_runs(study)]
    return diverged_seeds([run for run in runs if (run.seed or 0) < FIRST_TUNING_SEED])


def build_transfer(studies: Sequence[Path], platforms: Sequence[str]) -> TransferReport:
    """Read the evaluations of every counted run on its home platform and on `platforms`, and judge them.

    UserError for runs of several formats or devices, and for a platform of several machines.
    """
    runs, diverged = counted_runs(studies), diverged_runs(studies)
    homes = {(home_platform(run.record), run.record.target.device) for _, run in runs}
    if len(homes) > 1:
        trained = " and ".join(f"{name} on {device}" for name, device in sorted(homes))
        raise UserError(
            f"the runs were trained in {trained}; fix: name studies of one format and one machine"
        )
    home, device = homes.pop()
    names = [home, *(name for name in dict.fromkeys(platforms) if name != home)]
    matrix, missing = [], []
    for study, run in runs:
        folder = study / "runs" / run.name
        at_home = read_at_home(folder, run.record, home)
        for name in names:
            record = read(folder, name) if "@" in name else read_at_home(folder, run.record, name)
            if record is None or at_home is None:
                missing.append(f"{run.name} on {name}")
            elif (record.weights, record.windows) != (at_home.weights, at_home.windows):
                missing.append(f"{run.name} on {name} (its record is of other weights or another text)")
            else:
                matrix.append(_row(study.name, run, at_home, record))
    _refuse_two_machines(matrix)
    table: dict[str, dict[str, dict[int, float]]] = {name: {} for name in names}
    for row in matrix:
        table[row.platform].setdefault(row.arm, {})[row.seed] = row.loss
    plan = plan_file.read(studies[0])
    margin = plan.equivalence_margin if plan else MARGIN
    return TransferReport(
        studies=[study.name for study in studies],
        home=home,
        device=device,
        platforms=names,
        matrix=matrix,
        verdicts=judge_transfer(table, home, margin, diverged),
        disruptions=_disruptions([run for _, run in runs]),
        missing=missing,
        margin=margin,
        diverged=diverged,
    )


def _row(study: str, run: Run, home: PlatformRecord, record: PlatformRecord) -> MatrixRow:
    found = record.hellaswag
    gaps = [
        None if record.platform == home.platform else item_gap(home, record, norm) for norm in (False, True)
    ]
    items = RowItems(found.acc, found.acc_norm, *gaps) if found else None
    of_run = (study, run.name, run.variant, run.record.seed)
    return MatrixRow(*of_run, record.platform, record.loss, record.device, record.torch, items)


def _refuse_two_machines(matrix: Sequence[MatrixRow]) -> None:
    """Refuse a platform of several devices or versions of torch: the arms would differ by them."""
    first: dict[str, MatrixRow] = {}
    for row in matrix:
        other = first.setdefault(row.platform, row)
        if (row.device, row.torch) != (other.device, other.torch):
            arithmetic, _, machine = row.platform.partition("@")
            fix = f"PLATFORMS={arithmetic}" + (f" MACHINE={machine}" if machine else "")
            raise UserError(
                f"{row.platform} is of {other.device} with torch {other.torch} for {other.run}, and of "
                f"{row.device} with torch {row.torch} for {row.run}; fix: on one of them, make transfer with {fix}"
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
