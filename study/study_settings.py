"""The settings of a study in .config, a field a symbol, and the declarations of all symbols."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ra.arms import (
    BASELINE,
    VariantError,
    judged_arms,
    parse_arm,
    refuse_equal_arms,
    refuse_misnamed_files,
)
from runtime.declared_symbols import Symbol, read, walk
from runtime.dotconfig import Symbols, number_in
from runtime.settings import RECIPE_INTERVALS, BudgetConfig, Config, ModelConfig
from study.executors.slurm_executor import SIGNAL_SECONDS, time_limit_minutes

SYMBOL = "LEARNING_RATES"
GRPO_KEYS = {"AQN", "LR"}  # modifiers of the arms of a GRPO study


def read_rates(symbols: Symbols, variants: Sequence[str]) -> tuple[str, ...]:
    """Read the rates to tune, in ascending order. ConfigError for rates that cannot be tuned."""
    typed = symbols.text(SYMBOL).split()
    if not typed:
        return ()
    interval = RECIPE_INTERVALS["learning_rate"]
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
    return tuple(values[value] for value in sorted(values))


EXECUTORS = {"EXECUTOR_LOCAL": "local", "EXECUTOR_SLURM": "slurm", "EXECUTOR_RAY": "ray"}
ONLY_WSD = (
    "cannot be continued with a cosine schedule: only WSD can be continued, since a cosine has other learning rates at "
    "another count from the first step on; fix: CONFIG_SCHEDULE_WSD=y in both studies"
)
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class StudySettings:
    """name: folder in results_dir. variants: in the order of running. seeds: their number, from first_seed on.

    equal_time: iterations in proportion to speed; else the same number for all.
    equivalence_margin: in nats, of GRPO in accuracy.
    primary: the variant of the primary comparison; empty in a study of control arms alone.
    rates: to tune, on tuning_seeds; (): CONFIG_LEARNING_RATE for all.
    continues: folder of the shorter study to continue.
    slots: runs at once; 0: automatic.
    executor: "local", "slurm" or "ray".
    """

    name: Annotated[str, Symbol("STUDY_NAME", "verdict", "study")]  # plan.json has it
    variants: Annotated[tuple[str, ...], Symbol("VARIANTS", "verdict", "design")]
    seeds: Annotated[int, Symbol("SEEDS", "verdict", "design")]
    results_dir: Annotated[Path, Symbol("RESULTS_DIR", "free", "folder")]
    equal_time: Annotated[bool, Symbol("BUDGET_EQUAL_TIME", "numbers", "plan")]
    equivalence_margin: Annotated[
        float, Symbol("EQUIVALENCE_MARGIN_PERCENT", "verdict", within="(0, 100)")
    ] = math.log(1.01)
    primary: Annotated[str, Symbol("PRIMARY", "verdict", "design")] = ""
    rates: Annotated[tuple[str, ...], Symbol("LEARNING_RATES", "numbers")] = ()
    tuning_seeds: Annotated[int, Symbol("TUNING_SEEDS", "numbers")] = 0
    continues: Annotated[Path | None, Symbol("CONTINUES", "numbers", "start")] = None
    # Where CPU_THREADS is 0, the runs at once share the cores.
    slots: Annotated[int, Symbol("SLOTS", "rounding")] = 0
    executor: Annotated[str, Symbol("EXECUTOR_", "free", members=EXECUTORS)] = "local"
    slurm_options: Annotated[str, Symbol("SLURM_OPTIONS", "free", needs="EXECUTOR_SLURM")] = ""
    ray_address: Annotated[str, Symbol("RAY_ADDRESS", "free", needs="EXECUTOR_RAY")] = ""
    first_seed: Annotated[int, Symbol("FIRST_SEED", "verdict")] = 0

    @property
    def directory(self) -> Path:
        """The folder of the study."""
        return self.results_dir / self.name

    @property
    def seed_range(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> StudySettings:
        """Read the settings. ConfigError for an unsafe name, an unknown variant, or a run without a limit."""
        BudgetConfig.from_symbols(symbols)
        variants = _variants(symbols)
        rates = read_rates(symbols, variants)
        settings = read(
            cls,
            symbols,
            variants=variants,
            primary=_primary(symbols, variants),
            rates=rates,
            tuning_seeds=symbols.integer("TUNING_SEEDS") if rates else 0,
        )
        if not SAFE_NAME.fullmatch(settings.name):
            raise symbols.error(
                "STUDY_NAME",
                "is not a safe folder name; fix: use up to 64 letters, digits, . _ and -, the first a letter or digit",
            )
        if settings.seeds < 1:
            raise symbols.error("SEEDS", "leaves nothing to run; fix: CONFIG_SEEDS=1 or more")
        if settings.continues:
            _refuse_continuing(symbols)
        if settings.executor == "slurm":
            _check_slurm_options(symbols, settings.slurm_options)
        share = settings.equivalence_margin / 100  # the symbol is in percent
        return replace(settings, equivalence_margin=share if symbols.flag("GRPO") else math.log(1 + share))


# Each symbol of Kconfig; a choice by its members and by its name.
SYMBOLS = {
    name: symbol
    for symbol in (*walk(Config), *walk(StudySettings))
    for name in (symbol.name.rstrip("_"), *symbol.members)
}


def declared(name: str) -> Symbol:
    """Return the declaration of a symbol or of a choice. An unknown symbol may change numbers."""
    return SYMBOLS.get(name) or Symbol(name, "numbers")


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
    for arm in map(parse_arm, names) if symbols.flag("GRPO") else ():
        if arm.attention != BASELINE or {key for key, _ in arm.modifiers} - GRPO_KEYS:
            raise symbols.error(
                "VARIANTS",
                f"has {arm.name}, and GRPO trains its model alone: {BASELINE}, with +AQN= and +LR=; fix: remove it",
            )
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


def _refuse_continuing(symbols: Symbols) -> None:
    """Raise ConfigError where the runs of the shorter study have no state to continue from, or rates are tuned."""
    if not symbols.flag("SCHEDULE_WSD"):
        raise symbols.error("CONTINUES", ONLY_WSD)
    if symbols.text("LEARNING_RATES"):
        raise symbols.error(
            "CONTINUES",
            "and CONFIG_LEARNING_RATES exclude each other: longer runs can need other rates; fix: remove one",
        )


def _check_slurm_options(symbols: Symbols, options: str) -> None:
    """Raise ConfigError where a quote is not closed, or no time is left to save."""
    try:
        shlex.split(options)
    except ValueError as error:
        reason = f"{error}".lower()
        raise symbols.error("SLURM_OPTIONS", f"has {reason}; fix: quote it as on a command line") from None
    minutes = time_limit_minutes(options)
    if minutes is not None and minutes * 60 <= SIGNAL_SECONDS:
        raise symbols.error(
            "SLURM_OPTIONS",
            f"limits a job to {minutes:g} minutes, and runs begin to save {SIGNAL_SECONDS} s before their limit; fix: "
            "a longer --time",
        )
