"""`make sync [STUDY=results/x]`: send what the trackers of .config do not have of a study.

python -m scripts.sync [STUDY_DIR]    without STUDY_DIR: the study of .config. Exit status 1 if anything was not sent.
The trackers are those of .config if it names the study, else those of the study's configuration.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gpt2.config.config import TrackingConfig
from gpt2.config.dotconfig import read_symbols
from gpt2.system.errors import run_command
from scripts.report import study_directory
from study.runner.settings import StudySettings
from study.tracking.sync import KNOWN, NOTHING, REFUSED, SENT, sync_study


def tracking_of(directory: Path) -> TrackingConfig:
    """The trackers for a study: those of .config if it is of this study."""
    if Path(".config").exists():
        symbols = read_symbols(".config")
        settings = StudySettings.from_symbols(symbols)
        if (settings.results_dir / settings.name).absolute() == directory.absolute():
            return TrackingConfig.from_symbols(symbols)
    return TrackingConfig.from_symbols(read_symbols(directory / "config"))


def main() -> int:
    directory = study_directory("sync")
    outcomes = sync_study(directory, tracking_of(directory), lambda one: print(one.text, flush=True))
    counts = Counter(one.state for one in outcomes)
    print(", ".join(f"{counts[state]} {state}" for state in (SENT, KNOWN, NOTHING, REFUSED) if counts[state]))
    return 1 if counts[REFUSED] else 0


if __name__ == "__main__":
    run_command(main)
