"""The differences that a planned study can detect for each known noise, and the cheapest design. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean

from ra.names import is_control_arm
from referee.verdict.looks import nominal_levels
from runtime.files import read_json
from study.analysis.designs import Noise, StudyDesign, cheapest_design, detectable_difference
from study.planning.past import PastStudy, newest_noise
from study.runner.settings import StudySettings
from study.sweep.rates import most_runs

CONTROLS = ("B", "RAEARLY", "RALATE", "RAALL", "RAALT")
DOCS = Path(__file__).parents[2] / "docs" / "results"
PUBLISHED = "*-cpu-bytes-*seeds/report.json"  # the newest publication of the default CPU study


@dataclass(frozen=True)
class Sight:
    """The difference that a study detects (nats, 80 % power) at one noise.

    name: whose noise it is. source: of the noise, in words. sees: None for a study without a verdict. low, high: at the
    ends of the noise's 95 % interval. cheapest: the design of the fewest runs that detects the margin; cheapest_high:
    with the noise at the upper end.
    """

    name: str
    source: str
    noise: Noise
    sees: float | None
    low: float | None
    high: float | None
    cheapest: StudyDesign | None
    cheapest_high: StudyDesign | None


@dataclass(frozen=True)
class StudySight:
    """primary: the judged arm. controls, judged: numbers of arms. units: detectable difference over the noise of a run.

    seeds: at the last of the looks. level: of its t test. rows: one for each source of noise.
    known: whether one is of this model and data, or was given.
    """

    primary: str
    controls: int
    judged: int
    seeds: int
    looks: tuple[int, ...]
    level: float | None
    units: float | None
    rows: list[Sight]
    known: bool


def study_sight(
    settings: StudySettings, past: Sequence[PastStudy], given: float | None, looks: tuple[int, ...]
) -> StudySight:
    """Return what the study will detect at the last of its looks.

    given: noise of one run in percent of perplexity, from the user. looks: empty without a verdict.
    """
    seeds = looks[-1] if looks else settings.seeds
    level = nominal_levels(looks)[-1] if looks else None
    controls = sum(map(is_control_arm, settings.variants))
    judged = len(settings.variants) - controls
    sources = _sources(settings, past, given)
    rows = [
        _sight(name, source, noise, settings, controls, seeds, level)
        for name, source, noise in sources or published_noise(settings.primary)
    ]
    units = _sees(Noise.of_both(1.0), controls, seeds, level)
    return StudySight(settings.primary, controls, judged, seeds, looks, level, units, rows, bool(sources))


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


def published_noise(arm: str) -> list[tuple[str, str, Noise]]:
    """Return the noise of the control arms, and of the arm where it was judged, in the published CPU study."""
    path = max(DOCS.glob(PUBLISHED))
    report = read_json(path)
    source = f"docs/results/{path.parent.name}, whose model or data may be others"
    sigma = report["floor"]["sigma"]
    found = [("published controls", source, Noise.of_both(sigma, report["floor"]["dof"]))]
    for verdict in report["verdicts"]:
        if verdict["variant"] == arm:
            controls, spread = harmonic_mean(verdict["controls"]), verdict["test"]["spread"]
            dof = verdict["test"]["difference"]["count"] - 1
            noise = Noise.from_differences(spread, controls, sigma, dof)
            found.append((f"published {arm}", "its differences in the same study", noise))
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

    others = [name for name in settings.variants if not is_control_arm(name)]

    def runs(controls: int, seeds: int) -> int:
        if settings.rates is None:
            return (controls + max(len(others), 1)) * seeds
        return len(most_runs((*CONTROLS[:controls], *others), seeds, settings.rates))

    margin = settings.equivalence_margin
    return Sight(
        name=name,
        source=source,
        noise=noise,
        sees=_sees(noise, controls, seeds, level),
        low=_sees(low, controls, seeds, level),
        high=_sees(high, controls, seeds, level),
        cheapest=cheapest_design(noise, margin, runs),
        cheapest_high=cheapest_design(high, margin, runs),
    )


def _sees(noise: Noise, controls: int, seeds: int, level: float | None) -> float | None:
    """Return the detectable difference; None without a control arm or a look."""
    if controls < 1 or level is None:
        return None
    return detectable_difference(noise, controls, seeds, level)
