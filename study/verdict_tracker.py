"""Send a study's verdicts to the trackers, as one run named `verdict` in the study's group.

The process `python -m study.verdict_tracker STUDY_DIR LOGGER MODE PROJECT STUDY_PID` follows the rules of the
loggers of runs: it ends after a limited time and leaves its errors in the study's track.log. It reads report.json only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from referee.verdict.statistics import perplexity_percent
from runtime.files import DamagedFileError, read_json
from runtime.settings import TrackingConfig
from study.trackers import FINISH_SECONDS, ExperimentLoggers, Opening, Value, beside, connect, settings

MODULE = "study.verdict_tracker"
NAME = "verdict"


def track_verdict(study_dir: Path, tracking: TrackingConfig) -> None:
    """Send the verdicts of a finished study, in a limited time. A failure is printed and changes nothing."""
    try:
        note = ExperimentLoggers(study_dir, tracking, MODULE).finish(FINISH_SECONDS)
    except OSError as error:
        note = f"the verdict was not tracked: {error.strerror or error}; {study_dir / 'report.json'} has it"
    if note:
        print(note)


def verdict_values(study_dir: Path) -> dict[str, Value]:
    """Return verdict/VARIANT/{word,percent,low,high,p,seeds} of report.json; {} without a report.

    percent, low, high: change of perplexity in percent with its 95 % interval. p: after all corrections. A number that
    the report does not have is left out.
    """
    try:
        report = read_json(study_dir / "report.json")
        verdicts: list[dict[str, Any]] = report["verdicts"]
        found: dict[str, Value] = {}
        for one in verdicts:
            interval, start = one["test"]["difference"], f"{NAME}/{one['variant']}"
            numbers = {"percent": interval["mean"], "low": interval["low"], "high": interval["high"]}
            found[f"{start}/word"] = one["word"]
            found |= {f"{start}/{key}": perplexity_percent(x) for key, x in numbers.items() if x is not None}
            found |= {} if one["adjusted_p"] is None else {f"{start}/p": one["adjusted_p"]}
            found[f"{start}/seeds"] = interval["count"]
    except (FileNotFoundError, DamagedFileError, KeyError, TypeError):
        return {}
    return found


def forward(study_dir: Path, logger: str, mode: str, project: str) -> None:
    """Send the verdicts to one tracker."""
    values = verdict_values(study_dir)
    if not values:
        return
    client = connect(
        logger,
        Opening(
            folder=study_dir,
            project=project,
            name=NAME,
            group=study_dir.absolute().name,
            tags=(NAME,),
            config=settings(study_dir),
            mode=mode,
            job_type=NAME,
        ),
    )
    client.summarize(values, 0)
    client.finish(failed=False)


def main(arguments: list[str]) -> None:
    """Send the verdicts to one logger."""
    folder, logger, mode, project, study = arguments
    beside(int(study), lambda: forward(Path(folder), logger, mode, project))


if __name__ == "__main__":
    main(sys.argv[1:])
