"""Numbers and names of a report as text: perplexities, differences, accuracies, counts."""

from __future__ import annotations

from collections.abc import Iterable

from referee.verdict.statistics import Interval, percent, perplexity, with_interval
from study.analysis.paired_tests import ItemTest
from study.analysis.verdict import CANNOT_TELL
from study.hellaswag_scores import EndingsTask, near_chance
from study.report.report_data import Report, Row
from study.runs import diverged_seeds

NAMED = 8  # names that are listed, above which they are counted
CAPPED = (
    "p = 1.000: Holm's method multiplies the smallest of k p-values by k, the next one by k - 1, and so on; a product "
    "above 1 counts as 1."
)
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


def score(row: Row, task: EndingsTask, measure: str) -> str:
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


def capped(values: Iterable[float | None]) -> str:
    """Explain an adjusted p-value of 1; "" where none is."""
    shown = any(p is not None and p >= 0.9995 for p in values)
    return CAPPED if shown else ""


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


def run_names(report: Report) -> str:
    """How a run is named, by an example of this study."""
    if not report.used:
        return ""
    run, dotted = report.used[0], [run.name for run in report.used if run.name.endswith(f".{run.seed}")]
    text = f"A run is named by its variant and its seed: {run.name} is {run.variant} with seed {run.seed}"
    if dotted:
        text += f"; a dot separates a name with modifiers or a final digit from the seed, as in {dotted[0]}"
    return f"{text}."
