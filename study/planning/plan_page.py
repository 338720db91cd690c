"""The text of `make plan`: the runs and their cost, then what the study will be able to detect. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ra.variants import variant
from referee.pages.document import Block, BulletList, Document, Paragraph, Section, Table
from referee.verdict.statistics import perplexity_percent
from runtime.detected_hardware import cpu_threads, detect_hardware
from runtime.dotconfig import Symbols
from runtime.errors import free_bytes, gib
from runtime.gpu_specs import GIB, TargetError
from runtime.resolved_target import ResolvedTarget, resolve
from runtime.settings import CORE_WORK, Config
from study import plan_file
from study.analysis.designs import MOST_CONTROLS, StudyDesign
from study.analysis.verdict import VERDICT_SEEDS
from study.executors.child_process import runs_that_fit
from study.plan_file import Plan
from study.planning.micro_batch import MemoryPlanError, Predictions
from study.planning.planned_power import PastStudy, Sight, StudySight
from study.preconditions import earlier_looks, needed_bytes
from study.report.method import hours_text, seeds_text, size
from study.runs import RunList
from study.study_settings import StudySettings
from study.tuned_rates import judged_names, judged_study, most_judged, read_choice, tuning_study

# Forecast a study before its first run: runs, hours, disk space, memory. Nothing is trained or timed.


@dataclass(frozen=True)
class Hours:
    """Seconds of one run of each variant, and the sources of the numbers. train is empty where they are unknown.

    other: seconds of a run besides training; None where they are unknown.
    """

    train: dict[str, float]
    train_source: str
    other: float | None
    other_source: str

    def of(self, runs: Sequence[tuple[str, int]]) -> float | None:
        """Hours of these runs; None where the seconds of one are unknown."""
        if not all(name in self.train for name, _ in runs):
            return None
        return sum(self.train[name] + (self.other or 0.0) for name, _ in runs) / 3600


@dataclass(frozen=True)
class PeakMemory:
    """The predicted peak of the variant that needs most, or why there is none. usable: bytes of a process."""

    target: str
    usable: int
    micro: int
    accumulation: int
    variant: str = ""
    peak: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Forecast:
    """A study. runs: as (variant, seed). pending: the runs that are not finished.

    looks: the numbers of seeds at which the primary arm is judged, the present one last. at_once: runs at once on this
    machine.
    """

    settings: StudySettings
    config: Config
    runs: list[tuple[str, int]]
    pending: list[tuple[str, int]]
    one_seed: list[tuple[str, int]]
    looks: tuple[int, ...]
    hours: Hours
    disk_bytes: int
    memory: PeakMemory
    at_once: int

    def time(self, runs: Sequence[tuple[str, int]]) -> float | None:
        """Hours until these runs are finished; None where the seconds of one are unknown."""
        hours = self.hours.of(runs)
        return None if hours is None else hours / self.at_once


def forecasts(symbols: Symbols, text: str, past: Sequence[PastStudy]) -> list[Forecast]:
    """Forecast the studies of .config: with learning rates to tune, that of the rates, then the one that judges.

    Before the choice the second has the arms of the choice that needs most of them. text: of .config.
    """
    settings = StudySettings.from_symbols(symbols)
    if not settings.rates:
        return [forecast(symbols, past)]
    choice = read_choice(settings.directory)
    if choice and set(settings.variants) <= set(choice.arms):
        names = judged_names(settings.variants, {name: one.rate for name, one in choice.arms.items()})
    else:
        names = most_judged(settings.variants, settings.rates)
    studies = (tuning_study(settings, text), judged_study(settings, text, names, ""))
    return [forecast(one, past) for one, _ in studies]


def forecast(symbols: Symbols, past: Sequence[PastStudy]) -> Forecast:
    """Forecast the study of these symbols. past: finished studies of the same model and data, the newest first."""
    config, settings = Config.from_symbols(symbols), StudySettings.from_symbols(symbols)
    directory = settings.directory
    plan = plan_file.read(directory)
    listed = RunList(directory, settings.variants, settings.seed_range)
    runs, pending = listed.all(), listed.pending()
    resolved = _resolve(config)
    hours = _hours(config, settings, plan, past, resolved)
    return Forecast(
        settings=settings,
        config=config,
        runs=runs,
        pending=pending,
        one_seed=runs[: len(settings.variants)],
        looks=_looks(symbols, settings, plan if len(pending) < len(runs) else None),
        hours=hours,
        disk_bytes=needed_bytes(
            config.model.parameters,
            [_iterations(config, plan, name) for name, _ in pending],
            config.optimizer.schedule,
        ),
        memory=_memory(config, settings, plan, resolved),
        at_once=_at_once(config, settings, resolved),
    )


def _looks(symbols: Symbols, settings: StudySettings, plan: Plan | None) -> tuple[int, ...]:
    """Return the looks of the primary arm that have a verdict. Fewer seeds than planned do not change the plan.

    plan: None before the first run, when the plan follows CONFIG_SEEDS.
    """
    if plan is None:
        text = "\n".join(str(entry) for entry in symbols.entries.values() if entry.value != "n")
        planned = earlier_looks(settings.results_dir, text, settings.primary, settings.seed_range)
    else:
        planned = plan.looks.get(settings.primary, ())
    if not planned or settings.seeds > planned[-1]:
        planned = (*planned, settings.seeds)
    return tuple(seeds for seeds in planned if seeds >= VERDICT_SEEDS)


def _resolve(config: Config) -> ResolvedTarget:
    """Return this machine's device, or the configured target where it is another."""
    try:
        return resolve(config.target)
    except TargetError:
        return resolve(config.target, planning=True)


def _at_once(config: Config, settings: StudySettings, resolved: ResolvedTarget) -> int:
    """Return CONFIG_SLOTS, or for 0 the runs at once of this machine; 1 on a cluster, whose size is unknown."""
    if settings.executor != "local" or config.target.ranks > 1:
        return 1
    if settings.slots or resolved.device_type != "cpu":
        return settings.slots or (detect_hardware().count if resolved.torch else 1)
    return runs_that_fit(config.target.cpu_threads, cpu_threads(0), resolved.memory_bytes, config.small_step)


def _iterations(config: Config, plan: Plan | None, name: str) -> int:
    """Return the iterations of a run as far as they are known without timing; 0 otherwise."""
    if plan and name in plan.variants:
        return plan.variants[name].iterations
    limits = (config.budget.max_iterations, config.budget.max_tokens // _tokens(config))
    return min(filter(None, limits), default=0)


def _tokens(config: Config) -> int:
    """Tokens of an iteration."""
    return config.batch.effective * config.model.block_size


def _hours(
    config: Config,
    settings: StudySettings,
    plan: Plan | None,
    past: Sequence[PastStudy],
    resolved: ResolvedTarget,
) -> Hours:
    here = [study for study in past if study.device == resolved.device_name]
    train, source = _training(config, settings, plan, here)
    if not train and resolved.device_type == "cpu":
        work = config.model.parameters * _iterations(config, None, "") * _tokens(config)
        cores = config.target.cpu_threads or cpu_threads(0)
        train = dict.fromkeys(settings.variants, work / (cores * CORE_WORK))
        source = f"about {CORE_WORK:.0e} parameters x tokens a second of a core"
    if not here:
        return Hours(
            train, source, None, "evaluation, saving and starting are not included: no finished study"
        )
    seconds = here[0].overhead_seconds()
    return Hours(train, source, seconds, f"{seconds:.0f} s of other time a run, as in {here[0].directory}")


def _training(
    config: Config, settings: StudySettings, plan: Plan | None, here: Sequence[PastStudy]
) -> tuple[dict[str, float], str]:
    """Return the training seconds of one run of each variant, and their source."""
    timed = {name: plan.planned_seconds(name) for name in settings.variants if plan and name in plan.variants}
    known = {name: seconds for name, seconds in timed.items() if seconds is not None}
    if len(known) == len(settings.variants):
        return (
            known,
            f"step times measured on this machine ({settings.directory}/plan.json)",
        )
    budget = config.budget
    limits: list[tuple[float, str]] = []
    if budget.max_time_seconds:
        text = f"CONFIG_GPT2_MAX_TIME={budget.max_time_seconds}, which the slowest variant takes"
        limits.append((float(budget.max_time_seconds), text))
    if here and (iterations := _iterations(config, None, "")):
        seconds = iterations * _tokens(config) * here[0].seconds_per_token()
        limits.append((seconds, f"the speed of the slowest variant in {here[0].directory}"))
    if not limits:
        return {}, "no step was timed, no time limit is set, and no finished study shows a speed"
    seconds, source = min(limits)
    return dict.fromkeys(settings.variants, seconds), source


def _memory(
    config: Config, settings: StudySettings, plan: Plan | None, resolved: ResolvedTarget
) -> PeakMemory:
    at_once = _at_once(config, settings, resolved) if resolved.device_type == "cpu" else 1
    predictions = Predictions(config, resolved, at_once)
    variants = [variant(name, config.model, config.alternation) for name in settings.variants]
    target, usable = f"{resolved.target.name} ({resolved.device_name})", predictions.usable_bytes
    try:
        batch = predictions.choose_batch(variants, plan.batch if plan else None)
    except MemoryPlanError as error:
        return PeakMemory(target, usable, 0, 0, problem=f"{error}")
    known = [one for one in variants if not predictions.unpredictable(one, batch.micro)]
    if not known:
        reason = predictions.unpredictable(variants[0], batch.micro)
        return PeakMemory(target, usable, batch.micro, batch.accumulation, problem=reason)
    needs_most = max(known, key=lambda one: predictions.peak_bytes(one, batch.micro))
    peak = predictions.peak_bytes(needs_most, batch.micro)
    return PeakMemory(target, usable, batch.micro, batch.accumulation, needs_most.name, peak)


NIGHT_HOURS = 12
NOTHING_RUNS = "This command trains nothing and times nothing."


def plan_document(studies: Sequence[Forecast], settings: StudySettings, sight: StudySight) -> Document:
    """The plan of the studies of .config, and what the last one detects. settings: of .config."""
    judged = studies[-1]
    notes = [*tuning(studies), *times(studies), disk(studies), memory(judged), NOTHING_RUNS]
    blocks: list[Block] = [
        runs_table(studies),
        BulletList(notes),
        Section("What the study will be able to detect", sight_blocks(settings, sight)),
        BulletList(_remarks(sight)),
    ]
    return Document("", blocks)


def runs_table(studies: Sequence[Forecast]) -> Table:
    """Runs, hours, disk space and memory."""
    columns = {
        "study": lambda one: one.settings.name,
        "size": lambda one: one.config.model.size,
        "arms": lambda one: str(len(one.settings.variants)),
        "seeds": lambda one: str(one.settings.seeds),
        "runs": lambda one: str(len(one.runs)),
        "pending": lambda one: str(len(one.pending)),
        "time": lambda one: _time(one.time(one.pending)),
        "one more seed": lambda one: _time(one.time(one.one_seed)),
        "disk": lambda one: gib(one.disk_bytes),
        "micro-batch": lambda one: f"{one.memory.micro} x {one.memory.accumulation}",
        "peak memory": lambda one: gib(one.memory.peak) if one.memory.peak is not None else "unknown",
    }
    return Table.of(studies, columns)


def _time(hours: float | None) -> str:
    if hours is None:
        return "unknown"
    return hours_text(hours) if hours else "0"


def tuning(studies: Sequence[Forecast]) -> list[str]:
    """What the number of judged runs depends on, where learning rates are tuned."""
    if len(studies) == 1:
        return []
    rates, judged = studies
    return [
        f"{rates.settings.name} chooses the learning rates. {judged.settings.name} then judges every arm at its rate; "
        "before the choice its numbers are for the choice that needs most runs."
    ]


def times(studies: Sequence[Forecast]) -> list[str]:
    """The sources of the hours, and a plan of one night where this one takes longer."""
    last = studies[-1]
    at_once = f"; {last.at_once} runs at once" if last.at_once > 1 else ""
    found = [f"Time: {last.hours.train_source}; {last.hours.other_source}{at_once}."]
    if sum(one.time(one.pending) or 0.0 for one in studies) > NIGHT_HOURS:
        found += [
            "More than a night. Three arms, 3 seeds, an hour a run: make defconfig-gpt2-ra-ablation-night"
        ]
    return found


def disk(studies: Sequence[Forecast]) -> str:
    """The disk space that pending runs need, and the free space."""
    folder = studies[-1].settings.results_dir
    needed, free = sum(one.disk_bytes for one in studies), free_bytes(folder)
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


def sight_blocks(settings: StudySettings, sight: StudySight) -> list[Block]:
    """The differences that the study detects, and the cheapest design for the margin."""
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
    elif not sight.rows:
        about += (
            f" The noise is unknown: no finished study of this model and data is in {settings.results_dir}. The study "
            f"detects {sight.units:.2f} times the noise of one run. SPREAD=0.5 gives the noise in percent."
        )
    columns = {
        "noise of": lambda row: row.name,
        "a run varies": _deviation,
        "detects": _range,
        f"runs for {margin}": lambda row: _design(row.cheapest, sight),
    }
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
    if not sight.primary or not sight.controls or not sight.rows:
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
        found.append("In brackets: at the ends of the 95 % interval of the noise.")
    if any(row.noise.arm != row.noise.control for row in sight.rows):
        found.append("Two numbers: a run of the judged arm / of a control arm.")
    else:
        found.append("A judged arm that varies more than a control arm needs more seeds.")
    return found
