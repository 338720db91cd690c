"""How a report computes its numbers: its last section, for the parts that the report has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from referee.pages.document import Section, Table
from referee.pages.markup import Code, Text
from referee.verdict.statistics import Interval, percent, perplexity, with_interval
from study.analysis.verdict import CANNOT_TELL, VERDICT_SEEDS, ItemTest
from study.hellaswag_scores import EndingsTask, near_chance
from study.report.report_data import ArmRow, Report
from study.runs import BASELINE, SHARED, diverged_seeds

# Numbers and names of a report as text: perplexities, differences, accuracies, counts.


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


def method(report: Report) -> list[str]:
    """One sentence or more on each part of the report."""
    lines = [
        f"Losses are mean nats per {report.unit} on fixed validation windows; perplexity is exp(loss). Means, "
        "intervals and differences are computed from losses: a difference is the logarithm of a ratio of perplexities.",
        *_bits(report),
        '"final" is the last update. "best" is the lowest evaluation of a run; it is biased low for every variant.',
        "Differences are paired by seed: both runs saw the same batches in the same order from the same "
        "initial weights. Their intervals are Student's t over seeds, one by one, not adjusted for the number of "
        "variants.",
    ]
    if report.verdicts:
        lines += _verdict(report)
    if report.tuned:
        lines.append(
            "The rate of an arm has the lowest mean final loss over the tuning seeds; the control arms share the rate "
            "with the lowest mean over all of them (docs/learning-rates.md)."
        )
    return [*lines, "docs/verdicts.md has the statistics in full."]


def _bits(report: Report) -> list[str]:
    if not report.validation_bytes:
        return []
    return [
        "Bits per byte are the nats of all validation targets, over ln 2 and over the number of UTF-8 bytes that these "
        f"targets decode to ({report.validation_tokens:,} targets, {report.validation_bytes:,} bytes; an end of text "
        "has none). They compare models with different tokenizers on the same text (Gao et al. 2020, arXiv:2101.00027, "
        "section 3.1). Percent of perplexity refer to one target of this study's tokenizer."
    ]


def _verdict(report: Report) -> list[str]:
    lines = [
        "The verdict is a paired t test over seeds of (the variant's final loss minus the mean of the control arms at "
        "that seed), with S-1 degrees of freedom for S seeds and the interval of these differences. Control arms are "
        f"{BASELINE} and the fixed reciprocal patterns; arms whose losses agree to the last bit count once. p-values "
        "of the exploratory variants are adjusted by Holm's method; intervals are not. "
        f"Under {VERDICT_SEEDS} seeds there is no verdict.",
        "A variant that is neither better nor worse is equivalent within "
        f"{size(report.verdicts[0].margin)} (CONFIG_EQUIVALENCE_MARGIN_PERCENT) if two one-sided 5 % t tests place it "
        'within that margin. Otherwise the verdict is "cannot tell", which does not say that there is no difference.',
    ]
    if report.equal_time:
        lines.append(
            "Equal time (CONFIG_BUDGET_EQUAL_TIME=y): the number of updates follows the ratio of step times, so that a "
            "slower variant makes fewer updates and its verdict mixes speed and quality."
        )
    return lines


MOST_SEEDS = 40  # with their initial weights
TARGET = {
    "name": "target", "device": "device", "dtype": "dtype", "attention_backend": "attention backend",
    "torch": "torch", "driver": "driver",
}  # fmt: skip
ENVIRONMENT = {
    "python": "Python", "numpy": "NumPy", "cuda": "CUDA", "rocm": "ROCm", "cudnn": "cuDNN or MIOpen",
    "float32_matmul": "float32 products", "threads": "CPU threads", "platform": "platform",
}  # fmt: skip


def facts_section(report: Report) -> Section:
    """Each value once, with the number of runs where not all have it."""
    records = [run.record for run in report.used]
    if not records:
        return Section("", [])
    changes = ("", " with uncommitted changes")
    environments = [record.environment for record in records]
    facts: list[tuple[str, Iterable[Text]]] = [
        (name, _counted([getattr(record.target, key) for record in records])) for key, name in TARGET.items()
    ]
    facts += [
        ("batch", _counted([_listed(record.batch.to_json()) for record in records])),
        ("parameters", _counted([record.parameters and f"{record.parameters:,}" for record in records])),
        ("budget", [_listed(structs.asdict(report.budget) if report.budget else {})]),
        ("validation tokens", [f"{records[0].validation.tokens:,}"]),
        (
            "commit",
            _code([record.commit and record.commit + changes[bool(record.dirty)] for record in records]),
        ),
        ("config SHA-256", _code([record.config_sha256 for record in records])),
    ]
    prints = [record.fingerprint.to_json() for record in records]
    facts += [(f"fingerprint: {key}", _code([values.get(key) for values in prints])) for key in SHARED]
    weights = {run.seed: run.record.fingerprint.initial_weights for run in report.used}
    shown = [Code(f"seed {seed}: {value}") for seed, value in list(weights.items())[:MOST_SEEDS]]
    facts.append(("fingerprint: initial weights", shown))
    facts += [
        (name, _counted([getattr(found, key) for found in environments])) for key, name in ENVIRONMENT.items()
    ]
    variables = _named([found.variables for found in environments], "=")
    facts.append(("variables", variables or ["none set that changes numbers"]))
    modules = _named([found.code for found in environments], " ")
    facts.append(("custom source", modules))
    rows: list[list[Text]] = []
    for name, values in facts:
        found = [value for value in values if value]
        rows += [[name if number == 0 else "", value] for number, value in enumerate(found)]
    return Section("Experiment and fingerprint", [Table(["entry", "value"], rows, (1,))])


def _listed(values: Mapping[str, Any]) -> str:
    """Names and values in a line."""
    return " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _counted(values: Sequence[Any]) -> list[str]:
    """Each value once, with the number of runs where not all have it. None is no value."""
    count = Counter(str(value) for value in values if value is not None)
    return [
        value + (f" ({number} run{'' if number == 1 else 's'})" if number < len(values) else "")
        for value, number in count.most_common()
    ]


def _code(values: Sequence[Any]) -> list[Code]:
    return [Code(value) for value in _counted(values)]


def _named(tables: Sequence[Mapping[str, Any]], sign: str) -> list[Code]:
    """Lines of name, sign and value over the tables of all runs, by name."""
    return [
        line
        for name in sorted({name for table in tables for name in table})
        for line in _code([f"{name}{sign}{table[name]}" if name in table else None for table in tables])
    ]
