"""The planned comparison of a study, and later changes of it. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ra.names import is_control_arm
from runtime.dotconfig import ConfigError, parse_lines, read_text
from study.records.plan_file import Plan, Primary
from study.records.present import read_records
from study.records.runs import Run

Configuration = Mapping[str, str]  # symbol -> value


@dataclass(frozen=True)
class Design:
    """primary: as plan.json has it.

    looks: variant -> planned numbers of seeds. finished: variant -> planned seeds at which its run and those of the
    control arms count. altered: the primary comparison does not have its SHA-256.
    """

    primary: Primary | None = None
    looks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    altered: bool = False

    @property
    def arm(self) -> str:
        """The variant whose verdict is primary; empty without one."""
        return self.primary.arm if self.primary else ""


def read_design(plan: Plan | None, runs: Sequence[Run]) -> Design:
    """Return the design of a study with these runs."""
    if plan is None:
        return Design()
    looks = {name: row.looks for name, row in plan.variants.items() if row.looks}
    counted = {(run.variant, run.seed) for run in runs if run.used}
    unfinished = {run.seed for run in runs if not run.used and is_control_arm(run.variant)}
    finished = {
        name: sum((name, seed) in counted and seed not in unfinished for seed in range(counts[-1]))
        for name, counts in looks.items()
    }
    return Design(
        primary=plan.primary,
        looks=looks,
        finished=finished,
        altered=plan.primary is not None and plan.primary.sha256 != plan.primary.digest,
    )


def configuration(run_dir: Path) -> Configuration:
    """Return the saved settings of a run by symbol; empty where they cannot be read."""
    with contextlib.suppress(ConfigError, OSError):
        entries = parse_lines(read_text(run_dir / "config"), str(run_dir / "config"))
        return {name: entry.value for name, entry in entries.items()}
    return {}


def primary_arm(settings: Configuration) -> str | None:
    """Return the variant of the primary comparison in the settings; None in unreadable settings."""
    if "PRIMARY" not in settings:
        return None
    candidates = (name for name in settings.get("VARIANTS", "").split() if not is_control_arm(name))
    return settings["PRIMARY"] or next(candidates, "")


def recorded_settings(study_dir: Path, arm: Callable[[str], str] = str) -> dict[str, list[Configuration]]:
    """Return arm -> the settings of its runs, the fewest seeds first. arm: returns the arm of a run's variant."""
    found: dict[str, list[Configuration]] = {}
    for folder, record in read_records(study_dir).items():
        found.setdefault(arm(record.variant), []).append(configuration(folder))
    return {name: sorted(settings, key=planned_seeds) for name, settings in found.items()}


def planned_seeds(settings: Configuration) -> int:
    """Return CONFIG_SEEDS; 0 where it is unknown."""
    text = settings.get("SEEDS", "")
    return int(text) if text.isdecimal() else 0
