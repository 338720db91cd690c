"""The page of `make grpo`: answers, trajectory, final accuracies, divergence, logp_diff. Needs no torch."""

from __future__ import annotations

from grpo.grpo_settings import BASELINE
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
from study.arm_colors import color, legend
from study.grpo_report import DIVERGED, ArmResult, GrpoReport
from study.report.report_sentences import capped, p_text, seeds_text

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
