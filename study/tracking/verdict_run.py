"""Send a study's verdicts to the trackers, as one run named `verdict` in the study's group.

The process `python -m study.tracking.verdict_run STUDY_DIR LOGGER MODE PROJECT STUDY_PID` follows the rules of the
loggers of runs: it ends after a limited time and leaves its errors in the study's track.log. It reads report.json only.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.artifacts.experiment_loggers import FINISH_SECONDS, ExperimentLoggers, beside, settings
from gpt2.artifacts.tracker_clients import (
    Opening,
    Value,
    connect,
    message_digest,
    opened,
    tracked,
    write_tracked,
)
from gpt2.config.config import TrackingConfig
from gpt2.system.read_files import DamagedFileError, read_json
from study.stats.statistics import perplexity_percent

MODULE = "study.tracking.verdict_run"
NAME = "verdict"


def track_verdict(study_dir: Path, tracking: TrackingConfig) -> None:
    """Send the verdicts of a finished study, in a limited time. A failure is printed and changes nothing."""
    try:
        note = ExperimentLoggers(study_dir, tracking, MODULE).finish(FINISH_SECONDS)
    except OSError as error:
        note = f"the verdict was not tracked: {error.strerror or error}; fix: make sync STUDY={study_dir}"
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


def recorded_digest(study_dir: Path) -> str:
    """Return the digest that the note of tracked verdicts has; "" without verdicts."""
    values = verdict_values(study_dir)
    return message_digest([(values, 0)]) if values else ""


def forward(study_dir: Path, logger: str, mode: str, project: str) -> None:
    """Send the verdicts to one tracker, unless it has them."""
    values, digest = verdict_values(study_dir), recorded_digest(study_dir)
    known = tracked(study_dir, logger)
    if not values or (known.digest == digest and (known.sent or mode == "offline")):
        return
    note = opened(study_dir, logger)
    client = connect(
        logger,
        Opening(
            folder=study_dir,
            run_id=note.run_id,
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
    write_tracked(study_dir, logger, replace(note, digest=digest, sent=mode != "offline"))


def main(arguments: list[str]) -> None:
    """Send the verdicts to one logger."""
    folder, logger, mode, project, study = arguments
    beside(int(study), lambda: forward(Path(folder), logger, mode, project))


if __name__ == "__main__":
    main(sys.argv[1:])
