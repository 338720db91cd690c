"""Which process may write into the folder of a run: the newest one, whose id is in the file `attempt`.

A process that finds the id of another one ends without writing. So a worker that was believed dead and comes back
changes nothing, on any shared folder.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path

import msgspec

from runtime import files
from runtime.files import DamagedFileError, read_bytes

FILE = "attempt"
PLACE = "RA_PLACE"  # variable of a training process: its slot or job
EXIT_SUPERSEDED = 8  # of a process whose run another one has taken over


class Attempt(msgspec.Struct, frozen=True):
    """A process that trains, or trained, a run. place: slot or job."""

    id: str
    host: str
    process: int
    place: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + (f" ({self.place})" if self.place else "")


class Fence:
    """Takes a run over, and ends this process before it writes once another one has done the same."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        mine = Attempt(uuid.uuid4().hex, socket.gethostname(), os.getpid(), os.environ.get(PLACE, ""))
        self.content = msgspec.json.encode(mine)
        run_dir.mkdir(parents=True, exist_ok=True)
        files.write_bytes(run_dir / FILE, self.content)

    def check(self) -> None:
        """End this process at once, without writing, where another one has taken the run over."""
        path = self.run_dir / FILE
        if not path.exists() or path.read_bytes() != self.content:
            print(
                f"error: {self.run_dir} was taken over by {read_attempt(self.run_dir)}; this process ends without "
                "saving",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_SUPERSEDED)


def read_attempt(run_dir: Path) -> Attempt | None:
    """Return the newest attempt of a run; None without a readable one."""
    try:
        return msgspec.json.decode(read_bytes(run_dir / FILE), type=Attempt)
    except (FileNotFoundError, DamagedFileError, msgspec.DecodeError):
        return None
