"""Finished studies of the planned model and data: their noise, speed and overhead. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, median

from referee.verdict.statistics import mean, noise_floor, standard_deviation
from study.analysis.designs import Noise
from study.analysis.equivalence import Losses, control_losses
from study.records import plan_file
from study.records.design import Configuration, configuration
from study.records.runs import PENDING, Run, final_losses, read_expected, read_runs
from study.sweep.tuning import judged_at_best

SAME = (
    "GPT2_MODEL_",
    "DATASET_",
    "TOKENIZER_",
    "GPT2_BLOCK_SIZE",
    "GPT2_LAYERS",
    "GPT2_HEADS",
    "GPT2_WIDTH",
)  # model and data
SHAPES_NOISE = ("EFFECTIVE_BATCH", "GPT2_MAX_ITERS", "GPT2_MAX_TIME", "GPT2_MAX_TOKENS", "LEARNING_RATE")
LEAST_SEEDS = 3  # of an arm's differences, below which they give no noise of their own


@dataclass(frozen=True)
class PastStudy:
    """A finished study. differing: settings besides model and data that may change its noise."""

    directory: Path
    runs: tuple[Run, ...]
    differing: tuple[str, ...]

    @property
    def losses(self) -> Losses:
        """Final losses in nats by variant and seed, of the runs that ended their schedule."""
        return final_losses([run for run in self.runs if not run.record.truncated])

    def control_noise(self) -> Noise | None:
        """The noise floor of the control arms, for both arms; None without two control arms at a seed."""
        floor = noise_floor(control_losses(self.losses))
        return Noise.of_both(floor.sigma, floor.dof) if floor and floor.sigma > 0 else None

    def arm_noise(self, arm: str) -> Noise | None:
        """The noise of the arm's own differences; None under LEAST_SEEDS seeds."""
        table = self.losses
        seeds = sorted(table.get(arm, {}))
        pairs = [(seed, arms) for seed, arms in zip(seeds, control_losses(table, seeds), strict=True) if arms]
        if len(pairs) < LEAST_SEEDS:
            return None
        spread = standard_deviation([table[arm][seed] - mean(arms) for seed, arms in pairs])
        controls = harmonic_mean([len(arms) for _, arms in pairs])
        floor = noise_floor([arms for _, arms in pairs])
        dof = len(pairs) - 1
        if floor is None:
            sigma = spread / (1 + 1 / controls) ** 0.5
            return Noise.of_both(sigma, dof) if sigma > 0 else None
        return Noise.from_differences(spread, controls, floor.sigma, dof)

    def overhead_seconds(self) -> float:
        """Seconds of a run besides training (median), by the times of its files, and at least by its clocks."""
        found = []
        for run in self.runs:
            clock, folder = run.record.clock, self.directory / "runs" / run.name
            if clock and (folder / "config").exists():
                wall = (folder / "run.json").stat().st_mtime - (folder / "config").stat().st_mtime
                found.append(max(wall, clock.total) - clock.train)
        return median(found) if found else 0.0

    @property
    def evaluated(self) -> set[str]:
        """The held-out texts on which every run was evaluated at its end."""
        return set.intersection(*(set(run.record.eval_sets or {}) for run in self.runs))

    def seconds_per_token(self) -> float:
        """Training seconds of a token, of the slowest variant."""
        by_variant: dict[str, list[float]] = {}
        for run in self.runs:
            progress = run.record.progress
            by_variant.setdefault(run.variant, []).append(progress.train_seconds / progress.tokens)
        return max(mean(values) for values in by_variant.values())

    @property
    def device(self) -> str:
        return self.runs[-1].record.target.device


def find_past_studies(results_dir: Path, settings: Configuration) -> list[PastStudy]:
    """Return the finished studies of the same model and data, the newest first.

    settings: of the planned study by symbol. A folder that is not a finished study is left out.
    """
    found = []
    for directory in sorted(results_dir.glob("*/")) if results_dir.is_dir() else []:
        saved = next((read for run in sorted(directory.glob("runs/*/")) if (read := configuration(run))), {})
        if not saved or _chosen(saved) != _chosen(settings) or not read_expected(directory).variants:
            continue
        runs = judged_at_best(plan_file.read_valid(directory), read_runs(directory))
        used = tuple(run for run in runs if run.used)
        if used and not any(run.status in PENDING for run in runs):
            differing = tuple(name for name in SHAPES_NOISE if saved.get(name) != settings.get(name))
            found.append(PastStudy(directory, used, differing))
    return sorted(found, key=_newest, reverse=True)


def _chosen(settings: Configuration) -> Mapping[str, str]:
    """Return the settings of model and data; a choice that is off counts as absent."""
    return {
        name: value for name, value in settings.items() if name.startswith(SAME) and value not in ("n", "")
    }


def _newest(study: PastStudy) -> float:
    folder = study.directory / "runs"
    return max((folder / run.name / "run.json").stat().st_mtime for run in study.runs)


def newest_noise(past: Sequence[PastStudy], arm: str = "") -> tuple[PastStudy, Noise] | None:
    """Return the newest study with a noise floor, and the floor. arm: with enough seeds of it, and its noise."""
    found = ((study, study.arm_noise(arm) if arm else study.control_noise()) for study in past)
    return next(((study, noise) for study, noise in found if noise), None)
