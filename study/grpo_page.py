"""The page of `make grpo`: answers, trajectory, final accuracies, divergence, logp_diff. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo import records
from grpo.grpo_settings import BASELINE, GrpoSettings, run_name
from grpo.gsm8k import standard_error
from ra.noise_schedule import PRESETS
from referee.numerics.runs.logp_diff import THRESHOLD
from referee.pages.document import (
    COPY,
    HTML,
    MARKDOWN,
    SORT,
    Block,
    BulletList,
    Document,
    Figure,
    Legend,
    Note,
    Only,
    Section,
    Table,
)
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.markup import Strong, Text, escape_html
from referee.verdict.statistics import mean
from runtime.files import DamagedFileError
from study.analysis.verdict import Verdict, judge
from study.arm_colors import color, legend
from study.report.method import capped, p_text, seeds_text

# Collect the runs of a GRPO study and judge its arms. Needs neither torch nor TRL.
#
# A run that diverged is counted as that and is in no mean. An arm with a diverged run has no verdict: its other runs
# are those that noise happened to spare. Accuracies of the others are judged by the rules of every study: a paired t
# test over seeds against the baseline, Holm's method over the arms, two one-sided tests for equivalence.


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


CAPTION = "Accuracy during training: mean over seeds, with its standard error over test problems."
METHOD = (
    "Accuracy: share of test problems whose response, by greedy decoding without noise, ends with the published number "
    "(docs/grpo.md). ± is the standard error over test problems.",
    "An arm is compared with the baseline at the same seed, which has the same order of problems: a paired t test over "
    "seeds. The tests share 5 % by Holm's method. Under three seeds there is no answer.",
    "Equivalent: two one-sided 5 % tests place the difference within the margin.",
    "A diverged run is in no mean, and its arm is not judged.",
    "Noise is in the rollout alone: the loss is of the weights without noise. logp_diff is the log-probability of the "
    "sampled tokens in the rollout minus that in training, the mean over responses; noise makes it large, and GRPO "
    "has no correction for it here.",
)


def grpo_document(report: GrpoReport) -> Document:
    """grpo.html, grpo.md and the terminal."""
    names = [one.arm for one in report.arms]
    blocks: list[Block] = [
        BulletList([_sentence(one, report) for one in report.arms if one.arm != BASELINE or one.diverged]),
        BulletList([f"Left out: {text}" for text in report.problems]),
        BulletList(
            [f"Another device or version than that of the first run: {text}" for text in report.mixed]
        ),
        Only((HTML,), [legend(names) if len(names) > 1 else Legend([])]),
        Only(
            (HTML,),
            [Figure("accuracy", accuracy_figure(report), CAPTION)],
        ),
        Section("Accuracy after training", [_final(report)]),
        Note(capped(one.verdict.adjusted_p for one in report.arms if one.verdict)),
        Section("Accuracy during training", [_trajectory(report), Note(_trajectory_note(report))]),
        Section("Diverged runs", [BulletList(_diverged(report))]),
        Section("Rollout and training", [_logp(report), Note(_logp_note())]),
        Section("Checks", [BulletList(_checks(report))]),
        Only((HTML, MARKDOWN), [Section("Method", [BulletList(METHOD)])]),
    ]
    environment = ", ".join(
        f"{name} {version}" for name, version in report.environment.items() if name != "device"
    )
    device = report.environment.get("device", "")
    study = f"{report.study} · {report.model} · {seeds_text(report.seeds)} · {report.steps} steps"
    subtitle = f"{study} · {device} · {environment}"
    return Document("GRPO with noise in the rollout", blocks, subtitle=subtitle)


def _points(value: float) -> str:
    return f"{100 * value:.2f}"


def _difference(one: ArmResult) -> str:
    """The difference of accuracy from the baseline in percentage points with its interval."""
    if not one.verdict:
        return "-"
    found = one.verdict.test.difference  # of error rates
    interval = (
        ""
        if found.low is None or found.high is None
        else f" [{0.0 - found.high:+.2f}, {0.0 - found.low:+.2f}]"
    )
    return f"{0.0 - found.mean:+.2f}{interval}"


def _sentence(one: ArmResult, report: GrpoReport) -> Text:
    if one.word == DIVERGED:
        return (
            Strong(one.arm, bad=True),
            f": {len(one.diverged)} of {report.seeds} runs diverged; not judged.",
        )
    if report.arm(BASELINE).diverged:
        return (Strong(one.arm), ": not judged, because the baseline diverged.")
    verdict = one.verdict
    if not verdict:
        return (Strong(one.arm), ": no finished run with a baseline at its seed.")
    p = f", {p_text(verdict.adjusted_p)}" if verdict.adjusted_p is not None else ""
    return (
        Strong(one.arm),
        f": {verdict.word} ({_difference(one)} percentage points, {seeds_text(verdict.seeds)}{p}).",
    )


def _final(report: GrpoReport) -> Table:
    rows: list[list[Text]] = []
    for one in report.arms:
        preset = PRESETS.get(one.arm)
        noise = (
            f"{preset.start:g} to {preset.end:g}" if preset else "none" if one.arm == BASELINE else one.arm
        )
        last = one.trajectory[-1] if one.trajectory else None
        rows.append(
            [
                one.arm,
                noise,
                f"{_points(last.accuracy)} ± {_points(last.stderr)}" if last else "-",
                "reference" if one.arm == BASELINE else _difference(one),
                one.word or ("-" if one.arm != BASELINE else ""),
                f"{len(one.final)} of {report.seeds}",
                f"{len(one.diverged)}",
            ]
        )
    headings = ["arm", "sigma", "accuracy %", "against baseline", "verdict", "finished", "diverged"]
    return Table(headings, rows, text_columns=(1, 4), tools=(SORT, COPY))


def _trajectory(report: GrpoReport) -> Table:
    """A row per step, a column per arm; the difference from the baseline at the same seeds in brackets."""
    arms = [one for one in report.arms if one.trajectory]
    points = {(one.arm, point.step): point for one in arms for point in one.trajectory}
    rows: list[list[Text]] = []
    for step in sorted({step for _, step in points}):
        base = points.get((BASELINE, step))
        cells: list[Text] = [str(step)]
        for one in arms:
            point = points.get((one.arm, step))
            text = f"{_points(point.accuracy)}" if point else "-"
            difference = point.minus(base) if point and base and one.arm != BASELINE else None
            text += "" if difference is None else f" ({100 * difference:+.2f})"
            cells.append(text)
        rows.append(cells)
    return Table(["step", *(one.arm for one in arms)], rows)


def _trajectory_note(report: GrpoReport) -> str:
    errors = [point.stderr for one in report.arms for point in one.trajectory]
    if not errors:
        return ""
    return (
        "Percent, mean over finished runs; in brackets the difference from the baseline at the same seeds. Standard "
        f"error over {report.test_problems:,} problems: at most {_points(max(errors))}."
    )


def _diverged(report: GrpoReport) -> list[Text]:
    return [f"{one.arm}, seed {seed}: {why}" for one in report.arms for seed, why in one.diverged.items()]


def _logp(report: GrpoReport) -> Table:
    rows: list[list[Text]] = [
        [
            one.arm,
            f"{one.logp.mean:+.2g}",
            f"{one.logp.mean_absolute:.2g}",
            f"{one.logp.largest:.2g}",
            f"{one.logp.over} of {one.logp.steps}",
        ]
        for one in report.arms
        if one.logp
    ]
    return Table(
        ["arm", "logp_diff", "mean absolute", "largest of a step", f"steps over {THRESHOLD:g}"], rows
    )


def _logp_note() -> str:
    return (
        "Without noise a step over the threshold points to different arithmetic of sampling and training. With noise "
        "it is expected: the tokens are samples of other weights than those that are trained."
    )


def _checks(report: GrpoReport) -> list[str]:
    if not report.responses:
        return []
    return [
        f"{report.responses:,} responses are recorded with their rewards; SHA256SUMS of each run covers them.",
        "After each rollout every weight was compared with its bits before.",
    ]


def accuracy_figure(report: GrpoReport) -> Plain | None:
    """Accuracy against the step, a line per arm with the standard error over problems."""
    names = [one.arm for one in report.arms]
    data = [
        line(
            one.arm, color(one.arm, names), one.arm, label=one.arm, marker={"size": 7},
            x=[point.step for point in one.trajectory],
            y=[100 * point.accuracy for point in one.trajectory],
            error_y={"type": "data", "array": [100 * point.stderr for point in one.trajectory], "thickness": 1},
            hovertemplate=f"%{{y:.2f}} % at step %{{x}}<extra>{escape_html(one.arm)}</extra>",
        )
        for one in report.arms
        if one.trajectory
    ]  # fmt: skip
    if not data:
        return None
    narrow = {"margin": {"l": 50, "r": 60}, "font": {"size": 11}}
    return figure(data, 340, (60, 90, 16, 52), narrow, xaxis=axis("step"), yaxis=axis("accuracy in %"))
