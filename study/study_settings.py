"""The settings of a study in .config: name, variants, seeds, folder of results. Needs no torch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ra.arms import (
    BASELINE,
    VariantError,
    control_arms,
    judged_arms,
    parse_arm,
    refuse_equal_arms,
    refuse_misnamed_files,
)
from runtime.dotconfig import Symbols, number_in
from runtime.errors import UserError
from runtime.settings import OPTIMIZER_NUMBERS, BudgetConfig, ModelConfig
from study.plan_file import LearningRates

SYMBOL = "LEARNING_RATES"
FIRST_TUNING_SEED = 1000  # above every judged seed: CONFIG_SEEDS is 1000 at most
Table = Mapping[str, Mapping[str, Sequence[float | None]]]  # arm -> rate -> loss of each tuning seed in nats


def read_rates(symbols: Symbols, variants: Sequence[str]) -> LearningRates | None:
    """Read the rates, in ascending order; None without rates. ConfigError for rates that cannot be tuned."""
    typed = symbols.text(SYMBOL).split()
    if not typed:
        return None
    _, interval = OPTIMIZER_NUMBERS["learning_rate"]
    values: dict[float, str] = {}
    for rate in typed:
        value = None if "+" in rate else number_in(interval, rate)
        if value is None:
            raise symbols.error(
                SYMBOL, f'has {rate}, no number in {interval}; fix: use rates such as "3e-4 6e-4"'
            )
        if value in values:
            raise symbols.error(
                SYMBOL, f"has {values[value]} and {rate}, which are one rate; fix: remove one"
            )
        values[value] = rate
    if len(values) < 2:
        raise symbols.error(
            SYMBOL,
            'has one rate, so there is no choice; fix: name at least two, or CONFIG_LEARNING_RATES="" and '
            f"CONFIG_LEARNING_RATE={typed[0]}",
        )
    own = [name for name in variants if parse_arm(name).rate]
    if own:
        raise symbols.error(
            SYMBOL,
            f"crosses every arm with the rates, and {own[0]} has one; fix: remove +LR= from CONFIG_VARIANTS",
        )
    ascending = tuple(values[value] for value in sorted(values))
    return LearningRates(ascending, symbols.integer("TUNING_SEEDS"))


def tuning_runs(variants: Sequence[str], rates: LearningRates) -> list[tuple[str, int]]:
    """Return the (arm with its rate, seed) of every arm at every rate, ordered by seed."""
    return [
        (parse_arm(name).with_rate(rate).name, FIRST_TUNING_SEED + seed)
        for seed in range(rates.tuning_seeds)
        for name in variants
        for rate in rates.rates
    ]


def judged_runs(variants: Sequence[str], seeds: int, rates: LearningRates) -> list[tuple[str, int]]:
    """Return the (arm with its rate, seed) of the judged runs, ordered by seed.

    At each seed: every arm at its rate, then what separates the effect of an arm from that of its rate. Where the two
    rates differ, the arm also runs at the rate of the control arms, and the control arms run at the rate of the arm.
    """
    chosen = {name: rates.chosen[name] for name in variants if name in rates.chosen}
    common = control_rate(rates)
    pairs = list(chosen.items())
    if common:
        pairs += [(name, common) for name in chosen]
        controls = control_arms(chosen)
        pairs += [(name, rate) for rate in rates.rates if rate in chosen.values() for name in controls]
    names = dict.fromkeys(parse_arm(name).with_rate(rate).name for name, rate in pairs)
    return [(name, seed) for seed in range(seeds) for name in names]


def most_runs(
    variants: Sequence[str], seeds: int, rates: LearningRates, one_rate: bool = False
) -> list[tuple[str, int]]:
    """Return every run. Arms without a chosen rate get the rates that need the most runs, or one_rate."""
    others = [name for name in variants if not parse_arm(name).is_control]
    start, *further = rates.rates
    most = {name: further[place % len(further)] for place, name in enumerate(others)}
    guessed = {name: start if one_rate else most.get(name, start) for name in variants}
    assumed = rates.replace(chosen=guessed | dict(rates.chosen))
    return tuning_runs(variants, rates) + judged_runs(variants, seeds, assumed)


def function_class(name: str, variants: Iterable[str]) -> list[str]:
    """Return the arms that share one choice with an arm: the control arms, or the arm alone."""
    return control_arms(variants) if parse_arm(name).is_control else [name]


def control_rate(rates: LearningRates) -> str:
    """Return the rate of the control arms; "" before it is chosen, and in a study without them."""
    return next((rates.chosen[name] for name in control_arms(rates.chosen)), "")


def mean_losses(table: Table, rates: LearningRates) -> dict[str, float | None]:
    """Return rate -> mean loss over the tuning runs of all arms of the table; None where a loss is missing."""
    means: dict[str, float | None] = {}
    for rate in rates.rates:
        losses = [loss for by_rate in table.values() for loss in by_rate.get(rate, ())]
        known = [loss for loss in losses if loss is not None]
        whole = len(known) == len(table) * rates.tuning_seeds
        means[rate] = sum(known) / len(known) if whole and known else None
    return means


def choose(table: Table, rates: LearningRates) -> LearningRates:
    """Return the rates with a choice for each arm of the table: the lowest mean loss over the tuning seeds.

    The control arms share the mean over all of them. A rate is not eligible for an arm with a missing loss there. An
    existing choice stays. UserError for an arm without an eligible rate.
    """
    chosen = dict(rates.chosen)
    for name in (name for name in table if name not in chosen):
        group = {other: table[other] for other in function_class(name, table)}
        shared = control_rate(rates.replace(chosen=chosen)) if parse_arm(name).is_control else ""
        chosen[name] = shared or _lowest(name, mean_losses(group, rates))
    return rates.replace(chosen=chosen)


def _lowest(name: str, means: Mapping[str, float | None]) -> str:
    eligible = {rate: loss for rate, loss in means.items() if loss is not None}
    if not eligible:
        raise UserError(
            f"{name} has no finite loss at any of CONFIG_LEARNING_RATES ({', '.join(means)}); fix: use lower rates "
            "under another CONFIG_STUDY_NAME"
        )
    return min(eligible, key=lambda rate: eligible[rate])


def edge(rate: str, rates: LearningRates) -> str:
    """Return the next rate beyond the lowest or the highest, if the chosen one is at that edge; else ""."""
    beside = {rates.rates[0]: rates.rates[1], rates.rates[-1]: rates.rates[-2]}.get(rate)
    if not beside or float(rate) >= 1:
        return ""
    mantissa, exponent = f"{min(1.0, float(rate) ** 2 / float(beside)):.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


EXECUTORS = {"EXECUTOR_LOCAL": "local", "EXECUTOR_SLURM": "slurm", "EXECUTOR_RAY": "ray"}
ONLY_WSD = (
    "cannot be continued with a cosine schedule: only WSD can be continued, since a cosine has other learning rates at "
    "another count from the first step on; fix: CONFIG_SCHEDULE_WSD=y in both studies"
)
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class StudySettings:
    """name: folder in results_dir. variants: in the order of running. seeds: their number, from first_seed on.

    equal_time: iterations in proportion to speed; else the same number for all. equivalence_margin: in nats.
    primary: the variant of the primary comparison; empty in a study of control arms alone.
    rates: to tune; None: CONFIG_LEARNING_RATE for all. continues: folder of the shorter study to continue.
    slots: runs at once; 0: automatic.
    executor: "local", "slurm" or "ray".
    """

    name: str
    variants: tuple[str, ...]
    seeds: int
    results_dir: Path
    equal_time: bool
    equivalence_margin: float = math.log(1.01)
    primary: str = ""
    rates: LearningRates | None = None
    continues: Path | None = None
    slots: int = 0
    executor: str = "local"
    slurm_options: str = ""
    ray_address: str = ""
    first_seed: int = 0

    @property
    def seed_range(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> StudySettings:
        """Read the settings. ConfigError for an unsafe name, an unknown variant, or a run without a limit."""
        BudgetConfig.from_symbols(symbols)
        name, seeds = symbols.text("STUDY_NAME"), symbols.integer("SEEDS")
        if not SAFE_NAME.fullmatch(name):
            raise symbols.error(
                "STUDY_NAME",
                "is not a safe folder name; fix: use up to 64 letters, digits, . _ and -, the first a letter or digit",
            )
        if seeds < 1:
            raise symbols.error("SEEDS", "leaves nothing to run; fix: CONFIG_SEEDS=1 or more")
        variants, executor = _variants(symbols), EXECUTORS[symbols.choice(EXECUTORS)]
        return cls(
            name=name,
            variants=variants,
            seeds=seeds,
            results_dir=symbols.folder("RESULTS_DIR"),
            equal_time=symbols.flag("BUDGET_EQUAL_TIME"),
            equivalence_margin=math.log(1 + symbols.number("EQUIVALENCE_MARGIN_PERCENT", "(0, 100)") / 100),
            primary=_primary(symbols, variants),
            rates=read_rates(symbols, variants),
            continues=_continues(symbols),
            slots=symbols.integer("SLOTS"),
            executor=executor,
            slurm_options=_slurm_options(symbols) if executor == "slurm" else "",
            ray_address=symbols.text("RAY_ADDRESS") if executor == "ray" else "",
            first_seed=symbols.integer("FIRST_SEED"),
        )


def _variants(symbols: Symbols) -> tuple[str, ...]:
    """Return the arms. ConfigError for one that the model cannot have, or that has two names."""
    names = symbols.text("VARIANTS").split()
    layers = ModelConfig.from_symbols(symbols).layers
    if not names:
        raise symbols.error("VARIANTS", 'names no variant; fix: CONFIG_VARIANTS="B RAALL RALEARN"')
    try:
        refuse_misnamed_files()
    except VariantError as error:
        raise symbols.error("VARIANTS", f"cannot be read: {error}") from None
    try:
        refuse_equal_arms(names, layers)
    except VariantError as error:
        raise symbols.error("VARIANTS", f"cannot be run: {error}") from None
    return tuple(names)


def primary_arm(name: str, variants: Sequence[str]) -> str:
    """Return the arm of the primary comparison: CONFIG_PRIMARY, or the first that can be judged; "" without one."""
    return name or next(iter(judged_arms(variants)), "")


def _primary(symbols: Symbols, variants: tuple[str, ...]) -> str:
    """Return the arm of the primary comparison. ConfigError for one that cannot be judged."""
    name, candidates = symbols.text("PRIMARY"), judged_arms(variants)
    if name in variants and name not in candidates and not parse_arm(name).is_control:
        control = parse_arm(BASELINE).with_rate(parse_arm(name).rate).name
        raise symbols.error("PRIMARY", f"has no control arm; fix: add {control} to CONFIG_VARIANTS")
    if name and name not in candidates:
        known = ", ".join(candidates) or "none: all variants are control arms"
        raise symbols.error(
            "PRIMARY", f"is not a variant that can be judged; fix: use one of CONFIG_VARIANTS ({known})"
        )
    return primary_arm(name, variants)


def _continues(symbols: Symbols) -> Path | None:
    """Return the folder of the study to continue. ConfigError where its runs have no state to continue from."""
    text = symbols.text("CONTINUES")
    if text and not symbols.flag("SCHEDULE_WSD"):
        raise symbols.error("CONTINUES", ONLY_WSD)
    if text and symbols.text("LEARNING_RATES"):
        raise symbols.error(
            "CONTINUES",
            "and CONFIG_LEARNING_RATES exclude each other: longer runs can need other rates; fix: remove one",
        )
    return Path(text) if text else None


def _slurm_options(symbols: Symbols) -> str:
    """Return the options of sbatch. ConfigError where a quote is not closed."""
    options = symbols.text("SLURM_OPTIONS")
    try:
        shlex.split(options)
    except ValueError as error:
        reason = f"{error}".lower()
        raise symbols.error("SLURM_OPTIONS", f"has {reason}; fix: quote it as on a command line") from None
    return options
