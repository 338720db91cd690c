"""A fake W&B whose behaviour is TRACKER:

"refuse", "hang" (a minute), "hang for good" with a child process, "die" (at the fifth line), or "keep":
be offline and write every logged value into a folder.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_told = [0]
_kept: list[Path] = []


def init(**options: Any) -> None:
    if os.environ["TRACKER"] == "hang for good":
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import time; time.sleep(900)",
                "helper of study.trackers",
            ]
        )
        time.sleep(900)
    if os.environ["TRACKER"] == "keep":
        number = len(list(Path(options["dir"]).glob("wandb/*")))
        folder = Path(options["dir"]) / "wandb" / f"offline-run-20260101_{number:06d}-{options['mode']}"
        folder.mkdir(parents=True)
        _kept.append(folder / "received.jsonl")
    if os.environ["TRACKER"] == "refuse":
        raise ConnectionError("401: no such key")
    if os.environ["TRACKER"] == "hang":
        time.sleep(60)


def log(values: dict[str, Any], step: int) -> None:
    _told[0] += 1
    for path in _kept:
        with path.open("a") as file:
            file.write(json.dumps(values) + "\n")
    if os.environ["TRACKER"] == "die" and _told[0] == 5:
        sys.stderr.write("the tracker dies\n")
        os._exit(9)


def finish(exit_code: int = 0) -> None:
    pass


class run:  # noqa: N801  the name of W&B
    class summary:  # noqa: N801
        @staticmethod
        def update(values: dict[str, Any]) -> None:
            log(values, 0)
