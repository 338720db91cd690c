"""Claims: which process executes a run, on a folder that several machines share.

    <run>/claim.00000001, .00000002, ...   made with link(2); the highest number is the holder's
    <run>/claim.lock                       flock of the holder, while its process lives

A run is taken over by linking the next number: of many takers exactly one succeeds. The number is a fence: a process
that finds a higher one writes nothing more. A holder on another machine is dead if its claim does not change for
STALE_SECONDS by the clock of the observer, so clocks need not agree. A holder on this machine is dead if its flock is
free.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from study.executors.child_process import EXIT_SUPERSEDED

BEAT_SECONDS, STALE_SECONDS = 15.0, 120.0
WATCH_SECONDS = 1.0  # between two looks at the claim of another machine
OBSERVE_SECONDS = 5.0  # between two looks at a claim by a driver
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Holder:
    """The content of a claim. machine: host and boot. place: slot or job. done: the process has ended by itself."""

    host: str
    machine: str
    pid: int
    place: str = ""
    beats: int = 0
    done: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.place})" if self.place else "")


class ClaimedError(Exception):
    """Another process executes the run."""


def this_machine() -> str:
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"


def newest(folder: Path) -> tuple[int, str]:
    """Return the highest number and its text; (0, "") without a claim."""
    for path in reversed(_claims(folder)):
        with contextlib.suppress(FileNotFoundError):  # a new holder has removed it
            return _number(path), path.read_text(errors="replace")
    return 0, ""


def _claims(folder: Path) -> list[Path]:
    """Return the claims by number. Other files, such as an editor's copy of a claim, are none."""
    found = (path for path in folder.glob("claim.[0-9]*") if path.name.partition(".")[2].isdecimal())
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition(".")[2])


def read_holder(text: str) -> Holder | None:
    """Return the holder in the text of a claim; None where the text is damaged."""
    try:
        content: dict[str, Any] = json.loads(text)
        return Holder(**content)
    except (ValueError, TypeError):
        return None


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the flock of a run; False also where there is no lock file."""
    try:
        with (folder / "claim.lock").open("r") as file:
            return not _flock(file)
    except OSError:
        return False


def _flock(file: TextIO) -> bool:
    """Take the flock; False if another process has it. A file system without flock counts as free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class ClaimObserver:
    """Whether another process executes a run, by the clock of this process: the claim of a living holder changes."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._claim, self._since, self._next = newest(folder), clock(), clock()

    def is_alive(self) -> bool:
        """Return False where the holder has ended, or its claim has not changed for STALE_SECONDS.

        Reads the claim at most every OBSERVE_SECONDS.
        """
        now = self._clock()
        if now < self._next:
            return True
        self._next = now + OBSERVE_SECONDS
        found = newest(self.folder)
        holder = read_holder(found[1])
        if not found[1] or (holder and holder.done):
            return False
        if holder and holder.machine == this_machine():
            return is_locked(self.folder)
        if found != self._claim:
            self._claim, self._since = found, now
        return now - self._since < STALE_SECONDS


class Claim:
    """A claim on a run. Create it with `claimed`."""

    def __init__(
        self,
        folder: Path,
        place: str = "",
        machine: str = "",
        stale_seconds: float = STALE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.number = folder, 0
        self.holder = Holder(socket.gethostname(), machine or this_machine(), os.getpid(), place)
        self._stale_seconds, self._sleep = stale_seconds, sleep
        self._lock: TextIO | None = None

    def take(self) -> None:
        """Claim the run; ClaimedError if another process has it. Waits for the beats of another machine."""
        self._lock = (self.folder / "claim.lock").open("a")
        free = _flock(self._lock)
        try:
            number, text = newest(self.folder)
            seen = read_holder(text)
            if text and not (seen and seen.done):
                if seen and seen.machine == self.holder.machine:
                    if not free:
                        raise ClaimedError(f"{seen}")
                else:
                    self._wait_until_stale(number, text)
            elif not free:
                raise ClaimedError("another process")
            if not self._write(number + 1, exclusive=True):
                raise ClaimedError("another process, which took it at the same time")
        except ClaimedError:
            self._lock.close()
            raise
        self.number = number + 1
        for path in _claims(self.folder):
            if _number(path) < self.number:
                path.unlink(missing_ok=True)

    def _wait_until_stale(self, number: int, text: str) -> None:
        waited = 0.0
        while waited < self._stale_seconds:
            self._sleep(min(WATCH_SECONDS, self._stale_seconds))
            waited += WATCH_SECONDS
            again, now = newest(self.folder)
            seen = read_holder(now)
            if (again, now) != (number, text) and not (seen and seen.done):
                raise ClaimedError(f"{seen or 'another process'}")

    def _write(self, number: int, exclusive: bool = False) -> bool:
        """Write the claim completely, or not at all; False if the number is taken."""
        temporary = self.folder / f".claim.{uuid.uuid4().hex}.tmp"
        path = self.folder / f"claim.{number:08d}"
        try:
            temporary.write_text(json.dumps(asdict(self.holder)))
            if exclusive:
                os.link(temporary, path)
            else:
                temporary.replace(path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def is_held(self) -> bool:
        """Return whether no other process has taken the run over."""
        return newest(self.folder)[0] <= self.number

    def beat(self) -> bool:
        """Change the claim, for observers; False if another process has taken the run over."""
        if not self.is_held():
            return False
        self.holder = replace(self.holder, beats=self.holder.beats + 1)
        return self._write(self.number)

    def check(self) -> None:
        """End this process at once, without writing, if another one has taken the run over."""
        if not self.is_held():
            print(
                f"error: {self.folder} was taken over by {read_holder(newest(self.folder)[1])}; this process ends "
                "without saving",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_SUPERSEDED)

    def release(self) -> None:
        """Mark the claim as done, so that the next process need not wait."""
        if self.is_held():
            self.holder = replace(self.holder, done=True)
            self._write(self.number)
        if self._lock:
            self._lock.close()


@contextlib.contextmanager
def claimed(folder: Path, place: str = "") -> Iterator[Claim]:
    """Hold the claim on a run in the block, and beat. ClaimedError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    claim = Claim(folder, place)
    claim.take()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with contextlib.suppress(
                OSError
            ):  # a full disk or a server that is away: the next beat tries again
                if not claim.beat():
                    claim.check()

    thread = threading.Thread(target=beat, name="claim", daemon=True)
    thread.start()
    try:
        yield claim
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            claim.release()
