"""How a report computes its numbers: its last section, for the parts that the report has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from referee.pages.document import Section, Table
from referee.pages.markup import Text, counted
from referee.verdict.statistics import Interval, percent, perplexity, with_interval
from study.analysis.verdict import CANNOT_TELL, VERDICT_SEEDS, ItemTest
from study.hellaswag_scores import EndingsTask, near_chance
from study.report.report_data import ArmRow, Report
from study.runs import FinishedRecord, diverged_seeds

# Numbers and names of a report as text: perplexities, differences, accuracies, counts.


NAMED = 8  # names that are listed, above which they are counted
ONE_SEED = "one seed, control arms, differences are not evidence"


def size(difference: float) -> str:
    """The size of a change of perplexity, without a sign."""
    return percent(abs(difference)).lstrip("+")


def shown(interval: Interval | None, seeds: int | None = None) -> str:
    """A loss as perplexity, with its interval where there is one. seeds: of the variant, named where it has more."""
    return with_interval(interval, perplexity) + _of_fewer(interval, seeds)


def shown_bits(interval: Interval | None) -> str:
    """Bits per byte with the interval."""
    return with_interval(interval, lambda end: f"{end:.3f}")


def difference(interval: Interval | None, seeds: int | None = None) -> str:
    """A paired difference as a change of perplexity with its interval. seeds: as in `shown`."""
    return with_interval(interval, percent) + _of_fewer(interval, seeds)


def _of_fewer(interval: Interval | None, seeds: int | None) -> str:
    fewer = interval is not None and seeds is not None and interval.count < seeds
    return f" ({interval.count} of {seeds} seeds)" if interval and fewer else ""


def change(interval: Interval | None, control: bool) -> str:
    """A paired difference between studies or to the control arms; no verdict."""
    text = difference(interval)
    if interval is None:
        return text
    if interval.contains_zero is None:
        return f"{percent(interval.mean)} (one seed: not evidence)"
    renamed = control and not interval.contains_zero
    return f"{text}: noise, since it is the same function class" if renamed else text


def score(row: ArmRow, task: EndingsTask, measure: str) -> str:
    """An accuracy with its standard error; † marks one that is within two of them of chance."""
    value = getattr(row, task.key)
    rate, error = getattr(value, measure), getattr(value, f"{measure}_stderr")
    if rate is None or error is None:
        return "-"
    return f"{100 * rate:.1f} ± {100 * error:.1f} %{' †' if near_chance(rate, error) else ''}"


def uncounted(report: Report) -> str:
    """Name the runs that are not counted, with the cause; "" without one."""
    runs = report.uncounted
    listed = ", ".join(f"{run.name} ({run.cause or run.status})" for run in runs)
    verb = "is" if len(runs) == 1 else "are"
    lines = [f"{len(runs)} of {len(report.runs)} runs {verb} not counted: {listed}."] if runs else []
    for name, seeds in diverged_seeds(report.runs).items():
        planned = sum(run.variant == name for run in report.runs)
        lines.append(
            f"{name} diverged at {len(seeds)} of {seeds_text(planned)}; a diverged run is in no mean."
        )
    return " ".join(lines)


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def dof_text(dof: int) -> str:
    return "1 degree of freedom" if dof == 1 else f"{dof} degrees of freedom"


def seeds_text(count: int) -> str:
    return "one seed" if count == 1 else f"{count:,} seeds"


def hours_text(hours: float) -> str:
    """A length of time in the unit that one would say it in."""
    if hours >= 1.5:
        return f"{hours:,.1f} hours" if hours < 10 else f"{hours:,.0f} hours"
    minutes = max(1, round(60 * hours))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def item_result(test: ItemTest) -> str:
    """Items won and lost against the baseline, and what they allow one to say of these runs."""
    said = (
        CANNOT_TELL
        if test.adjusted_p >= 0.05
        else ("more right" if test.wins > test.losses else "fewer right")
    )
    return f"+{test.wins:,} / -{test.losses:,}, {p_text(test.adjusted_p)}: {said}"


def listed(names: list[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: list[str]) -> str:
    """The first NAMED names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


METHOD = (
    "Losses are mean nats per token on fixed validation windows; perplexity is exp(loss). Means, intervals and "
    "differences are computed from losses: a difference is the logarithm of a ratio of perplexities.",
    '"final" is the last update. "best" is the lowest evaluation of a run; it is biased low for every variant.',
    "Differences are paired by seed: both runs saw the same batches in the same order from the same initial weights. "
    "Their intervals are Student's t over seeds, not adjusted for the number of variants.",
    "The verdict is a paired t test over seeds of (the variant's final loss minus the mean of the control arms at that "
    "seed). p-values of the exploratory variants are adjusted by Holm's method; intervals are not. Under "
    f"{VERDICT_SEEDS} seeds there is no verdict.",
    "A variant that is neither better nor worse is equivalent if two one-sided 5 % t tests place it within the margin "
    '(CONFIG_EQUIVALENCE_MARGIN_PERCENT). Otherwise the verdict is "cannot tell", which does not say that there is no '
    "difference.",
    "docs/verdicts.md has the statistics in full, docs/report.md explains every section.",
)
FACTS: dict[str, Callable[[FinishedRecord], Any]] = {
    "device": lambda record: record.target.device,
    "number format": lambda record: record.target.dtype,
    "attention backend": lambda record: record.target.attention_backend,
    "torch": lambda record: record.target.torch,
    "driver": lambda record: record.target.driver,
    "CUDA or ROCm": lambda record: record.environment.cuda or record.environment.rocm,
    "Python": lambda record: record.environment.python,
    "platform": lambda record: record.environment.platform,
    "commit": lambda record: (
        record.commit and record.commit + (" with uncommitted changes" if record.dirty else "")
    ),
    "parameters": lambda record: record.parameters and f"{record.parameters:,}",
}


def facts_section(report: Report) -> Section:
    """What the runs ran on: each value once, with the number of runs where not all have it."""
    rows: list[list[Text]] = []
    for name, read in FACTS.items():
        counts = Counter(str(value) for run in report.used if (value := read(run.record)) is not None)
        runs = len(report.used)
        values = [
            value if count == runs else f"{value} ({counted(count, 'run')})"
            for value, count in counts.items()
        ]
        rows += [[name, ", ".join(values)]] if values else []
    return Section("Machine and code", [Table(["entry", "value"], rows, (1,))])
