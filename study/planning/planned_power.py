"""The differences that a planned study can detect for each known noise, and the cheapest design. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, median

from ra.arms import control_arms, controls_of, parse_arm
from referee.verdict.looks import nominal_levels
from referee.verdict.statistics import mean, noise_floor, standard_deviation
from study.analysis.designs import Noise, StudyDesign, cheapest_design, detectable_difference
from study.analysis.verdict import Losses, control_losses
from study.experiment import Configuration, configuration
from study.runs import PENDING, Run, final_values, read_expected, read_runs
from study.study_settings import StudySettings, declared
from study.tuned_rates import most_judged, tuning_arms

SAME = ("model", "data", "tokenizer")  # entries of a record that the studies have in common
SHAPES_NOISE = ("batch", "budget", "schedule")  # entries that may change the noise
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
        return final_values([run for run in self.runs if not run.record.truncated])

    def control_noise(self) -> Noise | None:
        """The noise floor of the control arms, for both arms; None without two control arms at a seed."""
        floor = noise_floor(control_losses(self.losses))
        return Noise.of_both(floor.sigma, floor.dof) if floor and floor.sigma > 0 else None

    def arm_noise(self, arm: str) -> Noise | None:
        """The noise of the arm's own differences; None under LEAST_SEEDS seeds."""
        table = self.losses
        seeds = sorted(table.get(arm, {}))
        pairs = [
            (seed, arms) for seed, arms in zip(seeds, control_losses(table, seeds, arm), strict=True) if arms
        ]
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
        if (
            not saved
            or _entries(saved, SAME) != _entries(settings, SAME)
            or not read_expected(directory).variants
        ):
            continue
        runs = read_runs(directory)
        used = tuple(run for run in runs if run.used)
        if used and not any(run.status in PENDING for run in runs):
            before, now = _entries(saved, SHAPES_NOISE), _entries(settings, SHAPES_NOISE)
            differing = [name for name in before | now if before.get(name) != now.get(name)]
            found.append(PastStudy(directory, used, tuple(differing)))
    return sorted(found, key=_newest, reverse=True)


def _entries(settings: Configuration, entries: Sequence[str]) -> dict[str, str]:
    """Return the settings that these entries of a record hold; what is off or empty counts as absent."""
    return {
        name: value
        for name, value in settings.items()
        if declared(name).entry in entries and value not in ("n", "")
    }


def _newest(study: PastStudy) -> float:
    folder = study.directory / "runs"
    return max((folder / run.name / "run.json").stat().st_mtime for run in study.runs)


def newest_noise(past: Sequence[PastStudy], arm: str = "") -> tuple[PastStudy, Noise] | None:
    """Return the newest study with a noise floor, and the floor. arm: with enough seeds of it, and its noise."""
    found = ((study, study.arm_noise(arm) if arm else study.control_noise()) for study in past)
    return next(((study, noise) for study, noise in found if noise), None)


CONTROLS = ("B", "RAEARLY", "RALATE", "RAALL", "RAALT")


@dataclass(frozen=True)
class Sight:
    """The difference that a study detects (nats, 80 % power) at one noise.

    name: whose noise it is. source: of the noise, in words. sees: None for a study without a verdict. low, high: at the
    ends of the noise's 95 % interval. cheapest: the design of the fewest runs that detects the margin.
    """

    name: str
    source: str
    noise: Noise
    sees: float | None
    low: float | None
    high: float | None
    cheapest: StudyDesign | None


@dataclass(frozen=True)
class StudySight:
    """primary: the judged arm. controls, judged: numbers of arms. units: detectable difference over the noise of a run.

    seeds: at the last of the looks. level: of its t test. rows: one for each known noise.
    """

    primary: str
    controls: int
    judged: int
    seeds: int
    looks: tuple[int, ...]
    level: float | None
    units: float | None
    rows: list[Sight]


def study_sight(
    settings: StudySettings, past: Sequence[PastStudy], given: float | None, looks: tuple[int, ...]
) -> StudySight:
    """Return what the study will detect at the last of its looks.

    given: noise of one run in percent of perplexity, from the user. looks: empty without a verdict.
    """
    seeds = looks[-1] if looks else settings.seeds
    level = nominal_levels(looks)[-1] if looks else None
    controls = len(controls_of(settings.primary, settings.variants))
    judged = len(settings.variants) - len(control_arms(settings.variants))
    rows = [
        _sight(name, source, noise, settings, controls, seeds, level)
        for name, source, noise in _sources(settings, past, given)
    ]
    units = _sees(Noise.of_both(1.0), controls, seeds, level)
    return StudySight(settings.primary, controls, judged, seeds, looks, level, units, rows)


def _sources(
    settings: StudySettings, past: Sequence[PastStudy], given: float | None
) -> list[tuple[str, str, Noise]]:
    """Return name, source and value of each noise: the given one alone, else those of finished studies."""
    if given is not None:
        return [("any run", f"SPREAD={given:g} of the command line", Noise.of_both(math.log1p(given / 100)))]
    found = []
    if floor := newest_noise(past):
        found.append(("control arms", _named(floor[0]), floor[1]))
    if settings.primary and (own := newest_noise(past, settings.primary)):
        found.append((f"{settings.primary}", f"its differences in {_named(own[0])}", own[1]))
    return found


def _named(study: PastStudy) -> str:
    """The study, and the settings that differ from the planned ones."""
    listed = ", ".join(f"CONFIG_{name}" for name in study.differing)
    return f"{study.directory}" + (f" (another {listed})" if listed else "")


def _sight(
    name: str,
    source: str,
    noise: Noise,
    settings: StudySettings,
    controls: int,
    seeds: int,
    level: float | None,
) -> Sight:
    low, high = noise.bounds()

    others = [name for name in settings.variants if not parse_arm(name).is_control]

    def runs(controls: int, seeds: int) -> int:
        if not settings.rates:
            return (controls + max(len(others), 1)) * seeds
        names, rates = (*CONTROLS[:controls], *others), settings.rates
        return len(most_judged(names, rates)) * seeds + len(tuning_arms(names, rates)) * settings.tuning_seeds

    return Sight(
        name=name,
        source=source,
        noise=noise,
        sees=_sees(noise, controls, seeds, level),
        low=_sees(low, controls, seeds, level),
        high=_sees(high, controls, seeds, level),
        cheapest=cheapest_design(noise, settings.equivalence_margin, runs),
    )


def _sees(noise: Noise, controls: int, seeds: int, level: float | None) -> float | None:
    """Return the detectable difference; None without a control arm or a look."""
    if controls < 1 or level is None:
        return None
    return detectable_difference(noise, controls, seeds, level)
