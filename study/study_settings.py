"""The settings of a study in .config: name, variants, seeds, folder of results. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ra.arms import (
    BASELINE,
    VariantError,
    judged_arms,
    parse_arm,
    refuse_equal_arms,
    refuse_misnamed_files,
)
from runtime.dotconfig import Symbols, number_in
from runtime.settings import OPTIMIZER_NUMBERS, BudgetConfig, ModelConfig
from study.executors.slurm_executor import SIGNAL_SECONDS, time_limit_minutes

SYMBOL = "LEARNING_RATES"
GRPO_KEYS = {"AQN", "LR"}  # modifiers of the arms of a GRPO study


def read_rates(symbols: Symbols, variants: Sequence[str]) -> tuple[str, ...]:
    """Read the rates to tune, in ascending order. ConfigError for rates that cannot be tuned."""
    typed = symbols.text(SYMBOL).split()
    if not typed:
        return ()
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

    name: str
    variants: tuple[str, ...]
    seeds: int
    results_dir: Path
    equal_time: bool
    equivalence_margin: float = math.log(1.01)
    primary: str = ""
    rates: tuple[str, ...] = ()
    tuning_seeds: int = 0
    continues: Path | None = None
    slots: int = 0
    executor: str = "local"
    slurm_options: str = ""
    ray_address: str = ""
    first_seed: int = 0

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
        name, seeds = symbols.text("STUDY_NAME"), symbols.integer("SEEDS")
        if not SAFE_NAME.fullmatch(name):
            raise symbols.error(
                "STUDY_NAME",
                "is not a safe folder name; fix: use up to 64 letters, digits, . _ and -, the first a letter or digit",
            )
        if seeds < 1:
            raise symbols.error("SEEDS", "leaves nothing to run; fix: CONFIG_SEEDS=1 or more")
        variants, executor = _variants(symbols), EXECUTORS[symbols.choice(EXECUTORS)]
        percent = symbols.number("EQUIVALENCE_MARGIN_PERCENT", "(0, 100)")
        return cls(
            name=name,
            variants=variants,
            seeds=seeds,
            results_dir=symbols.folder("RESULTS_DIR"),
            equal_time=symbols.flag("BUDGET_EQUAL_TIME"),
            equivalence_margin=percent / 100 if symbols.flag("GRPO") else math.log(1 + percent / 100),
            primary=_primary(symbols, variants),
            rates=(rates := read_rates(symbols, variants)),
            tuning_seeds=symbols.integer("TUNING_SEEDS") if rates else 0,
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
    """Return the options of sbatch. ConfigError where a quote is not closed, or no time is left to save."""
    options = symbols.text("SLURM_OPTIONS")
    try:
        minutes = time_limit_minutes(options)
    except ValueError as error:
        reason = f"{error}".lower()
        raise symbols.error("SLURM_OPTIONS", f"has {reason}; fix: quote it as on a command line") from None
    if minutes is not None and minutes * 60 <= SIGNAL_SECONDS:
        raise symbols.error(
            "SLURM_OPTIONS",
            f"limits a job to {minutes:g} minutes, and runs begin to save {SIGNAL_SECONDS} s before their limit; fix: "
            "a longer --time",
        )
    return options
