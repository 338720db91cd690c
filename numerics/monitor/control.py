"""The file that changes the targets of a monitor while it runs: <run>/monitor/control.json.

    {"targets": ["grad:blocks.3", "actv"]}

The monitor reads it when it changes, and watches these targets in every step, beside its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from numerics.dump_files import read_json, replacing, writing
from numerics.errors import NumericsError
from numerics.monitor.targets import MonitorTarget, parse_targets

NAME = "control.json"


def read_control(folder: Path) -> tuple[MonitorTarget, ...]:
    """Return the targets in the file of a folder; none without a file. NumericsError where it cannot be used."""
    path = folder / NAME
    if not path.exists():
        return ()
    content = read_json(path, "make monitor RUN= OFF=all")
    words = content.get("targets") if isinstance(content, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise NumericsError(f'{path} has no list "targets"; fix: make monitor RUN= OFF=all')
    return parse_targets(words)


def change_control(
    folder: Path, on: Sequence[str] = (), off: Sequence[str] = ()
) -> tuple[MonitorTarget, ...]:
    """Switch targets on and off, and return those that are on. off: as they were switched on, or "all"."""
    adding, removing = parse_targets(on), parse_targets(off)
    everything = MonitorTarget("all") in removing
    before = () if everything else read_control(folder)
    missing = [f"{target}" for target in removing if target not in before and target != MonitorTarget("all")]
    if missing:
        known = ", ".join(map(str, before)) or "nothing"
        raise NumericsError(f"{', '.join(missing)} is not switched on; fix: switch off {known}, or all")
    kept = [target for target in before if target not in removing]
    after = tuple(dict.fromkeys([*kept, *adding]))
    path = folder / NAME
    with writing(path, "check the permissions of the run's folder"), replacing(path) as temporary:
        temporary.write_text(
            json.dumps({"targets": [f"{target}" for target in after]}) + "\n", encoding="utf-8"
        )
    return after


class ControlFile:
    """Reads the file when it has changed. A file that cannot be used is reported once and changes nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.targets: tuple[MonitorTarget, ...] = ()
        self.problem = ""
        self._seen: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read a changed file. Returns whether targets or problem changed."""
        try:
            found = (self.folder / NAME).stat()
            now: tuple[int, int] | None = (found.st_mtime_ns, found.st_ino)
        except OSError:
            now = None
        if now == self._seen:
            return False
        self._seen = now
        try:
            self.targets, self.problem = read_control(self.folder), ""
        except NumericsError as error:
            self.problem = f"{error}"
        return True
