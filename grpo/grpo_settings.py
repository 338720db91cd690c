"""The settings of a GRPO study in .config. Needs neither torch nor TRL."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ra.noise_schedule import PRESETS, NoiseError, NoiseSchedule, parse_noise
from runtime.dotconfig import Symbols
from runtime.settings import TrackingConfig

BASELINE = "baseline"


def noise_of(arm: str) -> NoiseSchedule | None:
    """Return the schedule of an arm; None for the baseline. NoiseError for no arm."""
    if arm == BASELINE:
        return None
    try:
        return parse_noise(arm)
    except NoiseError as error:
        text = str(error).split("; fix: ")[0].removeprefix(f"AQN={arm}: ").removeprefix(f"AQN={arm} ")
        known = ", ".join((BASELINE, *PRESETS))
        raise NoiseError(f"arm {arm}: {text}; fix: use {known} or 0.05:0.0005[:intervals][:final]") from None


@dataclass(frozen=True)
class GrpoSettings:
    """Settings of a study. train_file, test_file: "" for the hub. margin: in percentage points.

    prompts: problems per step, each with `group` responses. micro_batch: responses per forward pass.
    max_steps, evaluate_limit: 0 for no limit. cpu_threads: 0 for all cores.
    """

    name: str
    results_dir: Path
    seeds: int
    arms: tuple[str, ...]
    model: str
    train_file: str
    test_file: str
    epochs: int
    max_steps: int
    prompts: int
    group: int
    micro_batch: int
    response_tokens: int
    learning_rate: float
    evaluate_steps: int
    evaluate_limit: int
    evaluate_batch: int
    checkpoint_steps: int
    margin: float
    cpu_threads: int
    tracking: TrackingConfig

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> GrpoSettings:
        """Read the settings. ConfigError for values that contradict each other."""
        number = {
            name.lower(): symbols.integer(f"GRPO_{name}")
            for name in ("EPOCHS", "MAX_STEPS", "PROMPTS", "GROUP", "MICRO_BATCH", "RESPONSE_TOKENS",
                         "EVALUATE_STEPS", "EVALUATE_LIMIT", "EVALUATE_BATCH", "CHECKPOINT_STEPS")
        }  # fmt: skip
        responses = number["prompts"] * number["group"]
        if responses % number["micro_batch"]:
            raise symbols.error(
                "GRPO_MICRO_BATCH",
                f"does not divide {number['prompts']} problems x {number['group']} responses = {responses}; "
                "fix: use a divisor",
            )
        model = symbols.text("GRPO_MODEL")
        if not model:
            raise symbols.error("GRPO_MODEL", "names no model; fix: a folder, or a name on the hub")
        return cls(
            name=symbols.text("STUDY_NAME"),
            results_dir=symbols.folder("RESULTS_DIR"),
            seeds=symbols.integer("SEEDS"),
            arms=_arms(symbols),
            model=model,
            train_file=symbols.text("GRPO_TRAIN_FILE"),
            test_file=symbols.text("GRPO_TEST_FILE"),
            learning_rate=symbols.number("GRPO_LEARNING_RATE", "(0, 1]"),
            margin=symbols.number("GRPO_MARGIN_POINTS", "(0, 100)"),
            cpu_threads=symbols.integer("CPU_THREADS"),
            tracking=TrackingConfig.from_symbols(symbols),
            **number,
        )

    @property
    def folder(self) -> Path:
        return self.results_dir / self.name

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Arm and seed of every run: all arms of a seed, then the next seed."""
        return [(arm, seed) for seed in range(self.seeds) for arm in self.arms]

    def run_dir(self, arm: str, seed: int) -> Path:
        return self.folder / "runs" / run_name(arm, seed)

    def steps(self, problems: int) -> int:
        """Return the optimizer steps of a run on this number of training problems."""
        steps = self.epochs * (problems // self.prompts)
        return min(steps, self.max_steps) if self.max_steps else steps

    def identity(self, problems: str) -> str:
        """Digest what runs of a study share. problems: digest of the training and test problems."""
        shared = (self.model, self.epochs, self.max_steps, self.prompts, self.group, self.micro_batch,
                  self.response_tokens, self.learning_rate, self.evaluate_steps, self.evaluate_limit,
                  self.evaluate_batch, problems)  # fmt: skip
        return hashlib.sha256(repr(shared).encode()).hexdigest()


def run_name(arm: str, seed: int) -> str:
    """Return the folder of a run: qerl0; 0.05-0.0005.0, because the arm ends with a digit."""
    name = arm.replace(":", "-")
    return f"{name}.{seed}" if name[-1:].isdigit() else f"{name}{seed}"


def _arms(symbols: Symbols) -> tuple[str, ...]:
    names = symbols.text("GRPO_ARMS").split()
    for position, name in enumerate(names):
        try:
            noise_of(name)
        except NoiseError as error:
            raise symbols.error("GRPO_ARMS", f"cannot be run: {error}") from None
        if name in names[:position]:
            raise symbols.error("GRPO_ARMS", f"names {name} twice; fix: remove one")
    if BASELINE not in names:
        raise symbols.error("GRPO_ARMS", f"lacks {BASELINE}, with which every arm is compared; fix: add it")
    return tuple(names)
