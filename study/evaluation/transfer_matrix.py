"""Collect the evaluations of finished runs on platforms, and judge them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ra.arms import control_arms, controls_of, parse_arm
from referee.verdict.design import MARGIN
from referee.verdict.rows import ACCURACY as GRPO_ACCURACY
from referee.verdict.rows import LOSS, Row
from referee.verdict.statistics import Interval, PairedTest, holm, mean, mean_interval, paired_t
from runtime.errors import UserError
from runtime.records import to_plain
from runtime.run_record import EVALUATIONS, LaterEvaluation, RunRecord, platform_of, read_evaluation
from study import plan_file
from study.analysis.verdict import LEVEL, VERDICT_SEEDS
from study.runs import SHARED, Run, diverged_seeds, read_runs

ITEMS_TASK, ACCURACY = "hellaswag", "acc_norm"  # by the log-likelihood of a character


@dataclass(frozen=True)
class ItemGap:
    """Accuracy on a platform minus accuracy at home, paired by item, with its 95 % interval over the items.

    flips: items that are right on one of the platforms and wrong on the other.
    """

    difference: Interval
    flips: int


def folder_of(run_dir: Path, platform: str) -> Path:
    """Return the folder of an evaluation on a platform."""
    return run_dir / EVALUATIONS / platform.replace(":", "-")


def read(run_dir: Path, record: RunRecord, platform: str) -> LaterEvaluation | None:
    """Return the evaluation of a run; None where there is none or a damaged one, which is evaluated again."""
    found = read_evaluation(folder_of(run_dir, platform), record)
    return found if found and found.platform == platform and _main_row(found) else None


def read_at_home(run_dir: Path, record: RunRecord, platform: str) -> LaterEvaluation | None:
    """Return the evaluation on a platform of the machine of training; None for one of another device."""
    found = read(run_dir, record, platform)
    return found if found and record.target and found.about["device"] == record.target.device else None


def elsewhere(run_dir: Path, record: RunRecord) -> list[str]:
    """Return the platforms of other machines on which the run was evaluated."""
    folders = sorted((run_dir / EVALUATIONS).glob("*@*/"))
    return [found.platform for folder in folders if (found := read_evaluation(folder, record))]


def loss_of(found: LaterEvaluation) -> Row:
    """Return the row of the validation loss, whose items are the mean losses of the windows; of GRPO the accuracy."""
    row = _main_row(found)
    assert row
    return row


def _main_row(found: LaterEvaluation) -> Row | None:
    return found.row(LOSS) or found.row(GRPO_ACCURACY)


def computed_by(found: LaterEvaluation) -> str:
    """Return the device and the version of torch."""
    return f"{found.about['device']}, torch {found.about['torch']}"


def gap(home: LaterEvaluation, other: LaterEvaluation) -> Interval:
    """Return the loss on a platform minus that on the home platform, in nats, paired by window.

    The interval is over windows of this text: it says nothing about another run.
    """
    pairs = zip(other.items(loss_of(other)), home.items(loss_of(home)), strict=True)
    return paired_t([away - here for away, here in pairs]).difference


def item_gap(home: LaterEvaluation, other: LaterEvaluation) -> ItemGap | None:
    """Compare HellaSwag on a platform with that on the home platform; None without a score of the same items."""
    here, there = home.row(ACCURACY), other.row(ACCURACY)
    if here is None or there is None or here.data != there.data:
        return None
    differences = [away - here for away, here in zip(other.items(there), home.items(here), strict=True)]
    return ItemGap(mean_interval(differences), sum(map(bool, differences)))


NO_GAP, GAP, SMALL_GAP = "no gap", "a gap", "a gap within the margin"
SHRINKS, GROWS = "shrinks the gap", "grows the gap"
COSTS, HELPS, FREE = "costs", "helps", "equivalent"
CANNOT_TELL, TOO_FEW = "cannot tell", "too few seeds"
ENDS = (NO_GAP, SMALL_GAP)  # no difference that noise could shrink

Losses = Mapping[str, Mapping[str, Mapping[int, float]]]  # platform -> arm -> seed -> loss in nats


@dataclass(frozen=True)
class TransferVerdict:
    """An answer. arm: with noise; "" for the gap itself. p_value, p_outside: by Holm; None under three seeds."""

    platform: str
    arm: str
    word: str
    test: PairedTest
    p_value: float | None
    p_outside: float | None

    @property
    def seeds(self) -> int:
        return self.test.difference.count


@dataclass(frozen=True)
class TransferVerdicts:
    """Answers to the three questions. gaps: one a platform. shrinks: platform and arm. costs: one an arm."""

    gaps: list[TransferVerdict]
    shrinks: list[TransferVerdict]
    costs: list[TransferVerdict]


def judge_transfer(
    losses: Losses, home: str, margin: float, diverged: Collection[str] = (), higher: bool = False
) -> TransferVerdicts:
    """Judge the platforms of a study. home: the platform of training. margin: of equivalence, in nats.

    higher: is better, as of accuracies. diverged: arms with a diverged run. Noise that made runs diverge is not judged
    by the others.
    """
    platforms = [name for name in losses if name != home]
    arms = list(losses.get(home, {}))
    controls = control_arms(arms)
    plain = controls or [arm for arm in arms if not parse_arm(arm).noise]
    noisy = [arm for arm in arms if parse_arm(arm).noise and arm not in diverged]

    def gap_of(platform: str, names: Sequence[str]) -> dict[int, float]:
        return _mean_by_seed([_minus(losses[platform].get(arm, {}), losses[home][arm]) for arm in names])

    found = [_verdict(name, "", gap_of(name, plain), margin) for name in platforms]
    gaps = _decided(found, {-1: GAP, 1: GAP, 0: NO_GAP}, within=SMALL_GAP)
    open_ones, better = [one.platform for one in gaps if one.word not in ENDS], 1 if higher else -1
    shrinks: list[TransferVerdict | None] = []
    costs: list[TransferVerdict | None] = []
    for arm in noisy:
        quiet = parse_arm(arm).without_noise.name
        bases = controls_of(quiet, arms) if quiet in controls else [quiet]
        bases = [base for base in bases if base in arms]
        if not bases:
            continue
        base = _mean_by_seed([losses[home][name] for name in bases])
        costs.append(_verdict(home, arm, _minus(losses[home][arm], base), margin))
        shrinks += [
            _verdict(platform, arm, _minus(gap_of(platform, [arm]), gap_of(platform, bases)), margin)
            for platform in open_ones
        ]
    return TransferVerdicts(
        gaps,
        _decided(shrinks, {better: SHRINKS, -better: GROWS, 0: CANNOT_TELL}),
        _decided(costs, {better: HELPS, -better: COSTS, 0: FREE}),
    )


def _minus(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {seed: loss - other[seed] for seed, loss in one.items() if seed in other}


def _mean_by_seed(arms: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean over the arms at each seed that all of them have."""
    seeds = set.intersection(*(set(arm) for arm in arms)) if arms else set()
    return {seed: mean([arm[seed] for arm in arms]) for seed in sorted(seeds)}


def _verdict(platform: str, arm: str, by_seed: Mapping[int, float], margin: float) -> TransferVerdict | None:
    if not by_seed:
        return None
    test = paired_t(list(by_seed.values()))
    enough = len(by_seed) >= VERDICT_SEEDS
    outside = test.p_outside(margin) if enough else None
    return TransferVerdict(platform, arm, TOO_FEW, test, (test.p_value or 0.0) if enough else None, outside)


def _decided(
    answers: Sequence[TransferVerdict | None], words: Mapping[int, str], within: str = ""
) -> list[TransferVerdict]:
    """Choose the words. words: of a difference below zero, above zero, and of equivalence.

    within: of a difference that is not zero and lies within the margin.
    """
    found = [one for one in answers if one]
    judged = [one for one in found if one.p_value is not None]
    p_values = holm([one.p_value or 0.0 for one in judged])
    outside = holm([1.0 if one.p_outside is None else one.p_outside for one in judged])
    adjusted = {id(one): pair for one, *pair in zip(judged, p_values, outside, strict=True)}
    result = []
    for one in found:
        if id(one) in adjusted:
            p, q = adjusted[id(one)]
            side = 1 if one.test.difference.mean > 0 else -1
            word = CANNOT_TELL
            if p < LEVEL:
                word = within if within and q < LEVEL else words[side]
            elif q < LEVEL:
                word = words[0]
            one = replace(one, word=word, p_value=p, p_outside=q)
        result.append(one)
    return result


@dataclass(frozen=True)
class TransferReport:
    """home: the platform of training, on device. missing: evaluations that do not exist yet. margin: in nats.

    matrix: the metric, and acc_norm of HellaSwag where it was scored, of every run on every platform.

    diverged: arm -> seeds of its runs whose loss was not finite. They are in no mean, and an arm with noise is not
    judged then: its other runs are those that did not diverge.
    """

    studies: list[str]
    home: str
    device: str
    platforms: list[str]
    matrix: list[Row]
    devices: dict[str, str]  # platform -> what computed it, with the version of torch
    verdicts: TransferVerdicts
    missing: list[str]
    margin: float
    diverged: dict[str, list[int]] = field(default_factory=dict)
    metric: str = LOSS

    @property
    def unit(self) -> str:
        """The unit of the metric."""
        return "nats" if self.metric == LOSS else "of accuracy"

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.matrix))

    def values(self, arm: str, platform: str, metric: str = "") -> dict[int, float]:
        """Return seed -> value of an arm on a platform, by default of the metric that is judged."""
        wanted = (arm, platform, metric or self.metric)
        return {row.seed: row.value for row in self.matrix if (row.arm, row.platform, row.metric) == wanted}

    def mean_gap(self, arm: str, platform: str) -> float | None:
        """Return the mean over seeds of loss on a platform minus loss at home of the same run; None without one."""
        gaps = _minus(self.values(arm, platform), self.values(arm, self.home))
        return mean(list(gaps.values())) if gaps else None


def counted_runs(studies: Sequence[Path]) -> list[tuple[Path, Run]]:
    """Return the counted runs with their study's folder. UserError without one."""
    found = [(study, run) for study in studies for run in read_runs(study) if run.used]
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
    """Return arm -> seeds of the diverged runs."""
    return diverged_seeds([run for study in studies for run in read_runs(study)])


def build_transfer(studies: Sequence[Path], platforms: Sequence[str]) -> TransferReport:
    """Read the evaluations of every counted run on its home platform and on `platforms`, and judge them.

    UserError for runs of several formats or devices, and for a platform of several machines.
    """
    runs, diverged = counted_runs(studies), diverged_runs(studies)
    homes = {(platform_of(run.record.target.dtype), run.record.target.device) for _, run in runs}
    if len(homes) > 1:
        trained = " and ".join(f"{name} on {device}" for name, device in sorted(homes))
        raise UserError(
            f"the runs were trained in {trained}; fix: name studies of one format and one machine"
        )
    home, device = homes.pop()
    metric = LOSS if runs[0][1].record.task == "gpt2" else GRPO_ACCURACY
    names = [home, *(name for name in dict.fromkeys(platforms) if name != home)]
    matrix: list[Row] = []
    missing, first = [], dict[str, tuple[str, str]]()
    losses: dict[str, dict[str, dict[int, float]]] = {name: {} for name in names}
    for study, run in runs:
        folder = study / "runs" / run.name
        at_home = read_at_home(folder, run.record, home)
        for name in names:
            found = (read if "@" in name else read_at_home)(folder, run.record, name)
            if found is None or at_home is None:
                missing.append(f"{run.name} on {name}")
                continue
            row = loss_of(found)
            if (found.about["weights"], row.data) != (at_home.about["weights"], loss_of(at_home).data):
                missing.append(f"{run.name} on {name} (its result is of other weights or another text)")
                continue
            _refuse_two_machines(
                name, *first.setdefault(name, (computed_by(found), run.name)), found, run.name
            )
            matrix += [row, *filter(None, [found.row(ACCURACY)])]
            losses[name].setdefault(row.arm, {})[row.seed] = row.value
    plan = plan_file.read(studies[0])
    margin = plan.margin if plan else MARGIN
    return TransferReport(
        studies=[study.name for study in studies],
        home=home,
        device=device,
        platforms=names,
        matrix=matrix,
        devices={name: device for name, (device, _) in first.items()},
        verdicts=judge_transfer(losses, home, margin, diverged, higher=metric != LOSS),
        metric=metric,
        missing=missing,
        margin=margin,
        diverged=diverged,
    )


def _refuse_two_machines(platform: str, device: str, first: str, found: LaterEvaluation, run: str) -> None:
    """Refuse a platform of several devices or versions of torch: the arms would differ by them."""
    if computed_by(found) == device:
        return
    arithmetic, _, machine = platform.partition("@")
    fix = f"PLATFORMS={arithmetic}" + (f" MACHINE={machine}" if machine else "")
    raise UserError(
        f"{platform} is of {device} for {first}, and of {computed_by(found)} for {run}; fix: on one of them, make "
        f"transfer with {fix}"
    )


def as_json(report: TransferReport) -> dict[str, Any]:
    """The report as plain data: `matrix` has the rows of each run and platform, `verdicts` the three questions."""
    plain: dict[str, Any] = to_plain(report)
    return {"schema": 2} | plain
