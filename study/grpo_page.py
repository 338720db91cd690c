"""The report of a GRPO study: verdicts on accuracy, its course, divergence, logp_diff. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.gsm8k import standard_error
from referee.numerics.runs.logp_diff import THRESHOLD
from referee.pages.document import (
    COPY,
    HTML,
    SORT,
    BulletList,
    Document,
    Figure,
    Finding,
    Findings,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.markup import Strong, Text, escape_html
from referee.verdict.design import MARGIN
from referee.verdict.statistics import mean, with_interval
from runtime.metrics_log import read_steps
from study import plan_file
from study.analysis.verdict import NO_ANSWER, Verdict, judge
from study.arm_colors import color, color_label, legend
from study.experiment import Experiment, finished_seeds, read_experiment
from study.plan_file import Plan
from study.report.method import capped, p_text, seeds_text
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
        accuracy = mean(list(self.accuracies[step].values()))
        return f"{100 * accuracy:.2f} ± {100 * standard_error(accuracy, problems):.2f}"


@dataclass(frozen=True)
class GrpoReport(CountedRuns):
    """The content of the report. problems: number of test problems."""

    study: str
    experiment: Experiment
    runs: list[Run]
    arms: list[ArmResult]
    problems: int
    notes: list[str]

    @property
    def damaged(self) -> list[str]:
        """Why runs do not count."""
        return [f"{run.name} does not count: {run.why_not}" for run in self.uncounted]

    @property
    def variants(self) -> list[str]:
        """The arms."""
        return [one.arm for one in self.arms]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the arms that are judged."""
        return [one.verdict for one in self.arms if one.verdict]

    @property
    def steps(self) -> list[int]:
        """The steps with an accuracy."""
        return sorted({step for one in self.arms for step in one.accuracies})


def build_report(study_dir: Path) -> GrpoReport:
    """Compute everything that the report says."""
    runs, plan = read_runs(study_dir), plan_file.read_valid(study_dir)
    used = [run for run in runs if run.used]
    rows = [row for run in used for row in run.rows]
    verdicts = judge_accuracies(plan, runs)
    return GrpoReport(
        study=study_dir.resolve().name,
        experiment=read_experiment(study_dir, plan, used),
        runs=runs,
        arms=[
            _result(study_dir, name, runs, verdicts) for name in dict.fromkeys(run.variant for run in runs)
        ],
        problems=rows[0].items if rows else 0,
        notes=[*provenance(used), *(plan.notes if plan else ())],
    )


def judge_accuracies(plan: Plan | None, runs: Sequence[Run]) -> dict[str, Verdict]:
    """Return arm -> verdict. An arm with a diverged run has none."""
    lost = {run.variant for run in runs if run.cause == DIVERGED}
    table = final_values([run for run in runs if run.used and run.variant not in lost])
    settings = (plan.margin, plan.primary, plan.looks) if plan else (MARGIN, "", {})
    first_seed = plan.first_seed if plan else 0
    found = judge(table, *settings, finished_seeds(plan, runs), first_seed, higher=True)
    return {one.variant: one for one in found}


def _result(study_dir: Path, name: str, runs: Sequence[Run], verdicts: dict[str, Verdict]) -> ArmResult:
    own = [run for run in runs if run.variant == name]
    accuracies: dict[int, dict[int, float]] = {}
    for run in (run for run in own if run.used):
        tokens_per_step = run.record.batch.effective * run.record.batch.block_size
        for tokens, value in run.values.items():
            accuracies.setdefault(tokens // tokens_per_step, {})[run.record.seed] = value
    diverged = {run.name: run.record.error or "" for run in own if run.cause == DIVERGED}
    steps = [step for run in own for step in read_steps(run.file(study_dir, "metrics.jsonl")).steps]
    logp = [(one.logp_diff, one.logp_diff_absolute or 0.0) for one in steps if one.logp_diff is not None]
    return ArmResult(name, len(own), accuracies, diverged, logp, verdicts.get(name))


def all_forms(study_dir: Path) -> tuple[GrpoReport, Document, dict[str, Any]]:
    """Return the report, its page and its plain data."""
    report = build_report(study_dir)
    return report, report_document(report), as_json(report)


def as_json(report: GrpoReport) -> dict[str, Any]:
    """Return the report as plain data."""
    keys = ("name", "variant", "seed", "status", "used", "why_not")
    plain = {"schema": 1} | dataclasses.asdict(dataclasses.replace(report, runs=[]))
    return plain | {"runs": [{key: getattr(run, key) for key in keys} for run in report.runs]}


def report_document(report: GrpoReport) -> Document:
    """report.html, report.md and the terminal."""
    arms, names, steps = report.arms, report.variants, report.steps
    final = {
        "arm": lambda one: one.arm,
        "accuracy %": lambda one: one.shown(steps[-1] if steps else 0, report.problems),
        "difference to B": lambda one: _difference(one.verdict),
        "verdict": lambda one: "" if one.arm == BASELINE else _word(one),
        "counted": lambda one: (
            f"{sum(run.used and run.variant == one.arm for run in report.runs)} of {one.runs}"
        ),
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
    course: list[list[Text]] = [
        [str(step), *(one.shown(step, report.problems) for one in arms)] for step in steps
    ]
    return Document(
        report.study,
        [
            Paragraph(report.experiment.text),
            Findings([_finding(one, names) for one in arms if one.arm != BASELINE]),
            Only((HTML,), [legend(names), Figure("accuracy", accuracy_figure(report), METHOD[0])]),
            Section("Accuracy after training", [Table.of(arms, final, (3,), tools=(SORT, COPY))]),
            Note(capped(one.adjusted_p for one in report.verdicts)),
            Section("Accuracy during training", [Table(["step", *names], course)]),
            Section("Rollout and training", [Table.of([one for one in arms if one.logp], logp)]),
            Section("Notes", [BulletList([*report.damaged, *report.notes])]),
            Section("Method", [BulletList(METHOD)]),
        ],
        subtitle=f"GRPO · {len(report.used)} of {len(report.runs)} runs counted",
    )


def _difference(verdict: Verdict | None) -> str:
    """The difference of accuracy from B in percentage points with its interval."""
    difference = verdict.test.difference if verdict else None
    return with_interval(difference, lambda end: f"{100 * end:+.2f}")


def _word(one: ArmResult) -> str:
    if one.diverged:
        return f"not judged: {len(one.diverged)} of {one.runs} runs diverged"
    return (
        one.verdict.word if one.verdict else "not judged: no counted run of B at its seeds, or one diverged"
    )


def _finding(one: ArmResult, names: Sequence[str]) -> Finding:
    label, word, verdict = color_label(one.arm, names), _word(one), one.verdict
    if not verdict:
        return Finding(label, "unsure", word, "-", (Strong(one.arm), f": {word}."))
    p = f", {p_text(verdict.adjusted_p)}" if verdict.adjusted_p is not None else ""
    numbers = f"{_difference(verdict)} percentage points, {seeds_text(verdict.seeds)}{p}"
    kind = "unsure" if word in NO_ANSWER else word
    sentence: Text = (Strong(one.arm), f" ({verdict.role}): {word} ({numbers}).")
    return Finding(label, kind, f"{verdict.role}: {word}", numbers, sentence)


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
    edges = (60, 90, 16, 52)
    return figure(data, 340, edges, narrow, xaxis=axis("step"), yaxis=axis("accuracy in %")) if data else None
