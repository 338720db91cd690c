"""The report of a GRPO study: verdicts on accuracy, its course, divergence, logp_diff. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from referee.numerics.runs.logp_diff import THRESHOLD
from referee.pages import document as page
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.markup import Strong, Text, escape_html
from referee.verdict.design import MARGIN
from referee.verdict.statistics import mean, with_interval
from runtime.metrics_log import read_steps
from study import plan_file
from study.analysis.verdict import NO_ANSWER, Verdict, judge
from study.arm_colors import color, color_label, legend
from study.experiment import Experiment, finished_seeds, read_experiment
from study.report.method import p_text, seeds_text
from study.runs import BASELINE, DIVERGED, CountedRuns, Run, final_values, provenance, read_runs

METHOD = (
    "Accuracy: share of test problems whose response, by greedy decoding without noise, ends with the published number "
    "(docs/grpo.md). ± is the standard error over test problems.",
    "An arm is compared with B at the same seed, which has the same order of problems: a paired t test over seeds. "
    "The tests of the exploratory arms share 5 % by Holm's method. Equivalent: two one-sided 5 % tests place the "
    "difference within the margin.",
    "A diverged run is in no mean, and its arm is not judged: its other runs are those that happened not to diverge.",
    "Noise is in the rollout alone: the loss is of the weights without noise. logp_diff is the log-probability of the "
    "sampled tokens in the rollout minus that in training, the mean over responses. Without noise a step over the "
    "threshold points to different arithmetic of sampling and training; with noise it is expected.",
)


@dataclass(frozen=True)
class ArmResult:
    """An arm. accuracies: step -> seed -> accuracy, of runs that count. diverged: run -> why."""

    arm: str
    runs: int
    accuracies: dict[int, dict[int, float]]
    diverged: dict[str, str]
    logp: list[tuple[float, float]]  # logp_diff and its mean absolute value, of every step of its runs
    verdict: Verdict | None  # None for B, without a seed in common, and where a run of either diverged

    def shown(self, step: int, problems: int) -> str:
        """The mean accuracy after a step in percent, with its standard error over problems."""
        if step not in self.accuracies:
            return "-"
        share = mean(list(self.accuracies[step].values()))
        return f"{100 * share:.2f} ± {100 * math.sqrt(share * (1 - share) / problems):.2f}"

    @property
    def difference(self) -> str:
        """The difference of accuracy from B in percentage points with its interval."""
        difference = self.verdict.test.difference if self.verdict else None
        return with_interval(difference, lambda end: f"{100 * end:+.2f}")

    @property
    def word(self) -> str:
        """The verdict in a few words."""
        if self.diverged:
            return f"not judged: {len(self.diverged)} of {self.runs} runs diverged"
        none = "not judged: no counted run of B at its seeds, or one diverged"
        return self.verdict.word if self.verdict else none


@dataclass(frozen=True)
class GrpoReport(CountedRuns):
    """The content of the report. problems: number of test problems."""

    study: str
    experiment: Experiment
    runs: list[Run]
    arms: list[ArmResult]
    variants: list[str]
    verdicts: list[Verdict]
    problems: int
    notes: list[str]

    @property
    def damaged(self) -> list[str]:
        """Why runs do not count."""
        return [f"{run.name} does not count: {run.why_not}" for run in self.uncounted]


def build_report(study_dir: Path) -> GrpoReport:
    """Compute everything that the report says. An arm with a diverged run has no verdict."""
    runs, plan = read_runs(study_dir), plan_file.read_valid(study_dir)
    used, names = [run for run in runs if run.used], list(dict.fromkeys(run.variant for run in runs))
    own = [f"{run.name}: {note}" for run in used for note in run.record.notes]
    lost = {run.variant for run in runs if run.cause == DIVERGED}
    table = final_values([run for run in used if run.variant not in lost])
    settings = (plan.margin, plan.primary, plan.looks) if plan else (MARGIN, "", {})
    first = plan.first_seed if plan else 0
    verdicts = judge(table, *settings, finished_seeds(plan, runs), first, higher=True)
    return GrpoReport(
        study=study_dir.resolve().name,
        experiment=read_experiment(study_dir, plan, used),
        runs=runs,
        arms=[_result(study_dir, name, runs, {one.variant: one for one in verdicts}) for name in names],
        variants=names,
        verdicts=verdicts,
        problems=used[0].rows[0].items if used else 0,
        notes=[*provenance(used), *(plan.notes if plan else ()), *own],
    )


def _result(study_dir: Path, name: str, runs: Sequence[Run], verdicts: dict[str, Verdict]) -> ArmResult:
    own = [run for run in runs if run.variant == name]
    accuracies: dict[int, dict[int, float]] = {}
    for run in (run for run in own if run.used):
        tokens_per_step = run.record.batch.effective * run.record.batch.block_size
        for tokens, value in run.values.items():
            accuracies.setdefault(tokens // tokens_per_step, {})[run.record.seed] = value
    diverged = {run.name: run.record.error or "" for run in own if run.cause == DIVERGED}
    steps = [step for run in own for step in read_steps(run.file(study_dir, "metrics.jsonl"))]
    logp = [(one.logp_diff, one.logp_diff_absolute or 0.0) for one in steps if one.logp_diff is not None]
    return ArmResult(name, len(own), accuracies, diverged, logp, verdicts.get(name))


def as_json(report: GrpoReport) -> dict[str, Any]:
    """Return the report as plain data."""
    keys = ("name", "variant", "seed", "status", "used", "why_not")
    plain = {"schema": 1} | dataclasses.asdict(dataclasses.replace(report, runs=[]))
    return plain | {"runs": [{key: getattr(run, key) for key in keys} for run in report.runs]}


def report_document(report: GrpoReport) -> page.Document:
    """report.html, report.md and the terminal."""
    arms, names = report.arms, report.variants
    steps = sorted({step for one in arms for step in one.accuracies})
    final = {
        "arm": lambda one: one.arm,
        "accuracy %": lambda one: one.shown(steps[-1] if steps else 0, report.problems),
        "difference to B": lambda one: one.difference,
        "verdict": lambda one: "" if one.arm == BASELINE else one.word,
        "counted": lambda one: f"{sum(run.variant == one.arm for run in report.used)} of {one.runs}",
    }
    logp = {
        "arm": lambda one: one.arm,
        "logp_diff": lambda one: f"{mean([value for value, _ in one.logp]):+.2g}",
        "mean absolute": lambda one: f"{mean([absolute for _, absolute in one.logp]):.2g}",
        "largest of a step": lambda one: f"{max(abs(value) for value, _ in one.logp):.2g}",
        f"steps over {THRESHOLD:g}": lambda one: (
            f"{sum(abs(value) > THRESHOLD for value, _ in one.logp)} of {len(one.logp)}"
        ),
    }
    rows: list[list[Text]] = [
        [str(step), *(one.shown(step, report.problems) for one in arms)] for step in steps
    ]
    chart = page.Figure("accuracy", accuracy_figure(report), METHOD[0])
    return page.Document(
        report.study,
        [
            page.Paragraph(report.experiment.text),
            page.Findings([_finding(one, names) for one in arms if one.arm != BASELINE]),
            page.Only((page.HTML,), [legend(names), chart]),
            page.Section("Accuracy after training", [page.Table.of(arms, final, (3,))]),
            page.Section("Accuracy during training", [page.Table(["step", *names], rows)]),
            page.Section("Rollout and training", [page.Table.of([one for one in arms if one.logp], logp)]),
            page.Section("Notes", [page.BulletList([*report.damaged, *report.notes])]),
            page.Section("Method", [page.BulletList(METHOD)]),
        ],
        subtitle=f"GRPO · {len(report.used)} of {len(report.runs)} runs counted",
    )


def _finding(one: ArmResult, names: Sequence[str]) -> page.Finding:
    label, verdict = color_label(one.arm, names), one.verdict
    if not verdict:
        return page.Finding(label, "unsure", one.word, "-", (Strong(one.arm), f": {one.word}."))
    p = f", {p_text(verdict.adjusted_p)}" if verdict.adjusted_p is not None else ""
    numbers = f"{one.difference} percentage points, {seeds_text(verdict.seeds)}{p}"
    kind = "unsure" if one.word in NO_ANSWER else one.word
    sentence: Text = (Strong(one.arm), f" ({verdict.role}): {one.word} ({numbers}).")
    return page.Finding(label, kind, f"{verdict.role}: {one.word}", numbers, sentence)


def accuracy_figure(report: GrpoReport) -> Plain | None:
    """Accuracy against the step, a line per arm."""
    names, data = report.variants, []
    for one in (one for one in report.arms if one.accuracies):
        means = {step: 100 * mean(list(by_seed.values())) for step, by_seed in sorted(one.accuracies.items())}
        data.append(
            line(
                one.arm, color(one.arm, names), one.arm, label=one.arm, marker={"size": 7},
                x=list(means), y=list(means.values()),
                hovertemplate=f"%{{y:.2f}} % at step %{{x}}<extra>{escape_html(one.arm)}</extra>",
            )
        )  # fmt: skip
    narrow = {"margin": {"l": 50, "r": 60}, "font": {"size": 11}}
    x, y = axis("step"), axis("accuracy in %")
    return figure(data, 340, (60, 90, 16, 52), narrow, xaxis=x, yaxis=y) if data else None
