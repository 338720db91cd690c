"""The text of `make plan`: the runs and their cost, then what the study will be able to detect. Needs no torch."""

from __future__ import annotations

from referee.pages.document import Block, BulletList, Document, Paragraph, Section, Table
from referee.verdict.statistics import perplexity_percent
from runtime.errors import free_bytes, gib
from runtime.gpu_specs import GIB
from study.analysis.designs import MOST_CONTROLS, StudyDesign
from study.analysis.verdict import VERDICT_SEEDS
from study.planning.forecast import Forecast
from study.planning.planned_power import Sight, StudySight
from study.report.report_sentences import hours_text, seeds_text, size

NIGHT_HOURS = 12
NOTHING_RUNS = "This command trains nothing and times nothing."


def plan_document(forecast: Forecast, sight: StudySight) -> Document:
    """The plan of a study, and what it detects."""
    blocks: list[Block] = [
        runs_table(forecast),
        BulletList([*tuning(forecast), *times(forecast), disk(forecast), memory(forecast), NOTHING_RUNS]),
        Section("What the study will be able to detect", sight_blocks(forecast, sight)),
        BulletList(_remarks(sight)),
    ]
    return Document("", blocks)


def runs_table(forecast: Forecast) -> Table:
    """Runs, hours, disk space and memory."""
    columns = {
        "size": lambda one: one.config.model.size,
        "arms": lambda one: str(len(one.settings.variants)),
        "seeds": lambda one: str(one.settings.seeds),
        "runs": lambda one: _range_of(one.fewest, len(one.runs)),
        "pending": lambda one: str(len(one.pending)),
        "time": lambda one: _time(one.time(one.pending)),
        "one more seed": lambda one: _time(one.time(one.one_seed)),
        "disk": lambda one: gib(one.disk_bytes),
        "micro-batch": lambda one: f"{one.memory.micro} x {one.memory.accumulation}",
        "peak memory": lambda one: gib(one.memory.peak) if one.memory.peak is not None else "unknown",
    }
    return Table.of([forecast], columns)


def _range_of(fewest: int, most: int) -> str:
    return str(most) if fewest == most else f"{fewest} to {most}"


def _time(hours: float | None) -> str:
    if hours is None:
        return "unknown"
    return hours_text(hours) if hours else "0"


def tuning(forecast: Forecast) -> list[str]:
    """The runs that choose learning rates, and what the number of judged runs depends on."""
    rates, arms = forecast.settings.rates, len(forecast.settings.variants)
    if rates is None:
        return []
    count = arms * len(rates.rates) * rates.tuning_seeds
    text = (
        f"Tuning: {arms} arms x {len(rates.rates)} rates x {seeds_text(rates.tuning_seeds)} = {count} runs."
    )
    if forecast.fewest < len(forecast.runs):
        text += " More judged runs are needed where the chosen rates differ; all other numbers are for the most runs."
    return [text]


def times(forecast: Forecast) -> list[str]:
    """The sources of the hours, and a plan of one night where this one takes longer."""
    at_once = f"; {forecast.at_once} runs at once" if forecast.at_once > 1 else ""
    found = [f"Time: {forecast.hours.train_source}; {forecast.hours.other_source}{at_once}."]
    if (forecast.time(forecast.pending) or 0.0) > NIGHT_HOURS:
        found += [
            "More than a night. Three arms, 3 seeds, an hour a run: make defconfig-gpt2-ra-ablation-night"
        ]
    return found


def disk(forecast: Forecast) -> str:
    """The disk space that pending runs need, and the free space."""
    folder = forecast.settings.results_dir
    needed, free = forecast.disk_bytes, free_bytes(folder)
    fits = "" if needed <= free else "; fix: free disk space, or set CONFIG_RESULTS_DIR to another disk"
    return f"Disk: {gib(needed)} needed at most, {gib(free)} free in {folder}{fits}."


def memory(forecast: Forecast) -> str:
    """The variant that needs most, and the memory of the target."""
    peak, size_name = forecast.memory, forecast.config.model.size
    if peak.peak is None:
        return f"Memory ({size_name}): {peak.problem}."
    return (
        f"Memory ({size_name}): {peak.variant} needs most, {gib(peak.peak)} of {peak.usable / GIB:.1f} GiB usable on "
        f"{peak.target}, predicted."
    )


# ---- power


def sight_blocks(forecast: Forecast, sight: StudySight) -> list[Block]:
    """The differences that the study detects, and the cheapest design for the margin."""
    settings = forecast.settings
    if not sight.primary:
        return [Paragraph("All arms are control arms: they differ by noise alone, so there is no verdict.")]
    if not sight.controls:
        return [Paragraph("There is no control arm, so there is no verdict; fix: add B to CONFIG_VARIANTS.")]
    margin = f"{perplexity_percent(settings.equivalence_margin):.3g} %"
    arms = "one control arm" if sight.controls == 1 else f"the mean of {sight.controls} control arms"
    about = f"{sight.primary} against {arms}, {seeds_text(sight.seeds)}, two-sided paired t test, 80 % power."
    if len(sight.looks) > 1 and sight.level is not None:
        about += f" Look {len(sight.looks)}, at level {100 * sight.level:.2g} %."
    if sight.level is None:
        about += (
            f" Under {VERDICT_SEEDS} seeds there is no verdict; fix: CONFIG_SEEDS={VERDICT_SEEDS} or more."
        )
    elif not sight.known:
        about += (
            f" The noise is unknown: no finished study of this model and data is in {settings.results_dir}. The study "
            f"detects {sight.units:.2f} times the noise of one run. SPREAD=0.5 gives the noise in percent."
        )
    columns = {
        "noise of": lambda row: row.name,
        "a run varies": _deviation,
        "detects": _range,
        f"runs for {margin}": lambda row: _design(row.cheapest, sight),
        "if the noise is at its upper limit": lambda row: _design(row.cheapest_high, sight),
    }
    if all(row.noise.dof is None for row in sight.rows):
        del columns["if the noise is at its upper limit"]
    sources = BulletList([f"Noise of {row.name}: {row.source}." for row in sight.rows])
    return [Paragraph(about), Table.of(sight.rows, columns), sources]


def _deviation(row: Sight) -> str:
    arm, control = size(row.noise.arm), size(row.noise.control)
    return arm if arm == control else f"{arm.removesuffix(' %')} / {control}"


def _range(row: Sight) -> str:
    if row.sees is None or row.low is None or row.high is None:
        return "no verdict"
    if row.noise.dof is None:
        return size(row.sees)
    return f"{size(row.sees)} [{size(row.low).removesuffix(' %')}, {size(row.high).removesuffix(' %')}]"


def _design(design: StudyDesign | None, sight: StudySight) -> str:
    if design is None:
        return "over 1,000 seeds"
    runs = (design.controls + sight.judged) * design.seeds
    tuned = f", {design.runs} with tuning" if design.runs > runs else ""
    return f"({design.controls} + {sight.judged}) x {design.seeds} = {runs}{tuned}"


def _remarks(sight: StudySight) -> list[str]:
    """How to read the table; empty where there is none."""
    if not sight.primary or not sight.controls:
        return []
    found = [
        f"Runs: the fewest, as (control + judged arms) x seeds, with 1 to {MOST_CONTROLS} control arms and "
        "all seeds planned at once."
    ]
    if any(
        row.cheapest and row.cheapest.runs > (row.cheapest.controls + sight.judged) * row.cheapest.seeds
        for row in sight.rows
    ):
        found.append(
            "Tuned: with the tuning runs, if all chosen rates differ. A verdict must then hold at one rate, too, so "
            "its power is somewhat lower."
        )
    if sight.judged > 1:
        found.append("The other judged arms are exploratory: they share Holm's correction and detect less.")
    if any(row.noise.dof is not None for row in sight.rows):
        found.append(
            "In brackets: at the ends of the 95 % interval of the noise. Last column: at its upper end."
        )
    if any(row.noise.arm != row.noise.control for row in sight.rows):
        found.append("Two numbers: a run of the judged arm / of a control arm.")
    else:
        found.append("A judged arm that varies more than a control arm needs more seeds.")
    return found
