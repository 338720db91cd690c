"""Collect the runs of a GRPO study and judge its arms. Needs neither torch nor TRL.

A run that diverged is counted as that and is in no mean. An arm with a diverged run has no verdict: its other runs are
those that noise happened to spare. Accuracies of the others are judged by the rules of every study: a paired t test
over seeds against the baseline, Holm's method over the arms, two one-sided tests for equivalence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo import records
from grpo.grpo_settings import BASELINE, GrpoSettings, run_name
from grpo.gsm8k import standard_error
from referee.verdict.statistics import mean
from runtime.files import DamagedFileError
from study.analysis.verdict import Verdict, judge

CONTROL = "B"  # the name under which judge() knows the baseline
DIVERGED = "diverged"


@dataclass(frozen=True)
class Logp:
    """logp_diff over the steps of an arm's runs: mean, mean absolute, largest size, steps over the threshold."""

    mean: float
    mean_absolute: float
    largest: float
    over: int
    steps: int


@dataclass(frozen=True)
class Point:
    """Mean accuracy of an arm's finished runs after a step. stderr: over test problems. by_seed: of each run."""

    step: int
    accuracy: float
    stderr: float
    by_seed: dict[int, float]

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    def minus(self, other: Point) -> float | None:
        """Return the mean difference over the seeds that both have; None without one."""
        shared = self.by_seed.keys() & other.by_seed.keys()
        return mean([self.by_seed[seed] - other.by_seed[seed] for seed in sorted(shared)]) if shared else None


@dataclass(frozen=True)
class ArmResult:
    """An arm. final: seed -> accuracy of the finished runs. diverged: seed -> why. word: of its verdict."""

    arm: str
    final: dict[int, float]
    diverged: dict[int, str]
    missing: list[int]
    trajectory: list[Point]
    logp: Logp | None
    word: str = ""
    verdict: Verdict | None = None

    @property
    def accuracy(self) -> float | None:
        return mean(list(self.final.values())) if self.final else None


@dataclass(frozen=True)
class GrpoReport:
    """problems: runs that do not agree with their records, which are left out. margin: in percentage points.

    mixed: runs on another device or other versions than the first run, which `environment` is of.
    """

    study: str
    model: str
    environment: dict[str, str]
    steps: int
    seeds: int
    test_problems: int
    margin: float
    arms: list[ArmResult]
    responses: int
    problems: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)

    def arm(self, name: str) -> ArmResult:
        return next(one for one in self.arms if one.arm == name)


def build_report(settings: GrpoSettings, identity: str) -> GrpoReport:
    """Read, verify and judge the runs that ended."""
    plan = records.plan(settings.folder, settings.seeds, settings.margin)
    found, problems = _ended_runs(settings, identity)
    arms = [_result(arm, settings, [one for one in found if one.arm == arm]) for arm in settings.arms]
    final = [one.final for one in found if one.final]
    return GrpoReport(
        study=settings.name,
        model=settings.model,
        environment=dict(found[0].environment) if found else {},
        steps=found[0].steps if found else 0,
        seeds=settings.seeds,
        test_problems=final[0].problems if final else 0,
        margin=plan.margin,
        arms=_judged(arms, plan),
        responses=sum(one.responses for one in found),
        problems=problems,
        mixed=_mixed(found),
    )


def _mixed(runs: Sequence[records.GrpoRecord]) -> list[str]:
    """Name the runs whose device or versions are not those of the first run."""
    found = []
    for one in runs:
        first = runs[0].environment
        differing = [
            name for name in {**first, **one.environment} if one.environment.get(name) != first.get(name)
        ]
        if differing:
            given = ", ".join(f"{name} {one.environment.get(name)} ({first.get(name)})" for name in differing)
            found.append(f"{one.run}: {given}")
    return found


def _ended_runs(settings: GrpoSettings, identity: str) -> tuple[list[records.GrpoRecord], list[str]]:
    """Return the records of runs that ended and agree with their files, and what is wrong with the others."""
    found: list[records.GrpoRecord] = []
    problems = []
    for arm, seed in settings.runs:
        run_dir, name = settings.run_dir(arm, seed), run_name(arm, seed)
        try:
            record = records.read(run_dir)
            if record is None or record.status not in records.ENDED:
                continue
            wrong = records.problems_of(run_dir)
        except DamagedFileError as error:
            record, wrong = None, [str(error)]
        if record and record.identity != identity:
            wrong.append("it has other settings or problems")
        if record and found and record.initial_weights != found[0].initial_weights:
            wrong.append(f"it began with other weights than {found[0].run}")
        if record and not wrong:
            found.append(record)
        problems += [f"{name}: {text}" for text in wrong]
    return found, problems


def _result(arm: str, settings: GrpoSettings, runs: Sequence[records.GrpoRecord]) -> ArmResult:
    finished = [(one, one.final) for one in runs if one.final]
    steps = sorted({each.step for one, _ in finished for each in one.evaluations})
    points = []
    for step in steps:
        each = {one.seed: e for one, _ in finished for e in one.evaluations if e.step == step}
        by_seed = {seed: e.accuracy for seed, e in each.items()}
        accuracy, problems = mean(list(by_seed.values())), next(iter(each.values())).problems
        points.append(Point(step, accuracy, standard_error(accuracy, problems), by_seed))
    lines = [line for one in runs for line in records.train_steps(settings.run_dir(arm, one.seed))]
    sizes = [(line, line.logp_diff) for line in lines if line.logp_diff is not None]
    logp = None
    if sizes:
        logp = Logp(
            mean=mean([size for _, size in sizes]),
            mean_absolute=mean([line.logp_diff_absolute for line, _ in sizes]),
            largest=max(abs(size) for _, size in sizes),
            over=sum(line.logp_diff_over for line, _ in sizes),
            steps=len(sizes),
        )
    ended = {one.seed for one in runs}
    return ArmResult(
        arm=arm,
        final={one.seed: last.accuracy for one, last in finished if last},
        diverged={one.seed: one.error or "" for one in runs if one.status == records.DIVERGED},
        missing=[seed for seed in range(settings.seeds) if seed not in ended],
        trajectory=points,
        logp=logp,
    )


def _judged(arms: Sequence[ArmResult], plan: records.GrpoPlan) -> list[ArmResult]:
    """Judge error rates in percentage points: less is better. An arm with a diverged run is not judged."""
    judged = [one for one in arms if one.final and not one.diverged]
    table = {
        CONTROL if one.arm == BASELINE else one.arm: {seed: 100 * (1 - a) for seed, a in one.final.items()}
        for one in judged
    }
    baseline = table.get(CONTROL, {})
    verdicts = judge(
        table,
        plan.margin,
        looks=dict.fromkeys(table, plan.looks),
        finished={name: len(by_seed.keys() & baseline.keys()) for name, by_seed in table.items()},
    )
    by_arm = {one.variant: one for one in verdicts}
    return [
        dataclasses.replace(
            one,
            verdict=by_arm.get(one.arm),
            word=DIVERGED if one.diverged else by_arm[one.arm].word if one.arm in by_arm else "",
        )
        for one in arms
    ]


def as_json(report: GrpoReport) -> dict[str, Any]:
    """Return the report as plain data."""
    return {"schema": 1} | dataclasses.asdict(report)
