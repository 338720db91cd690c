"""The process of one run: started by the study in a session of its own, listened to line by line, stopped politely."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_FINISHED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 3
EXIT_OUT_OF_MEMORY, EXIT_NOT_FINITE, EXIT_DISK_FULL = 4, 5, 6
PATIENCE_SECONDS = 60.0  # for a step to end and a checkpoint to be written
# A training step frees and takes the same large buffers over and over: a heap that keeps them spares the page faults
# of fresh ones. Another value of GLIBC_TUNABLES in the environment wins.
KEEP_HEAP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"


def keep_heap() -> None:
    """Begin this process anew with the heap that a training process has, unless the environment names one."""
    if "GLIBC_TUNABLES" not in os.environ and sys.platform == "linux":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": KEEP_HEAP})


class Child:
    """`python -m scripts.train ...` with its events on a pipe and everything else in its log file."""

    def __init__(
        self, arguments: list[str], log: Path, lock: int | None = None, module: str = "scripts.train"
    ) -> None:
        """lock: a descriptor that the process is to hold as long as it lives. module: what is run, for a bench."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._log_file = log.open("a")
        self._log_start = log.stat().st_size
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--parent", str(os.getpid())],
            env={"GLIBC_TUNABLES": KEEP_HEAP} | os.environ,
            pass_fds=() if lock is None else (lock,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C at the terminal reaches the study alone, which passes it on
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """The events as they come, until the process closes its output. Other lines go to the log."""
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "event" in event:
                yield event
            else:
                self._log_file.write(line)
                self._log_file.flush()

    def wait(self) -> int:
        """The exit status; negative where a signal ended the process."""
        status = self.process.wait()
        self._log_file.close()
        return status

    def stop(self) -> int:
        """Ask it to save and stop; after PATIENCE_SECONDS it is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.wait()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def last_words(self) -> str:
        """The last line that it wrote into its log and that says anything."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            written = file.read().decode(errors="replace")
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    hint = {
        "SIGKILL": " (by the system's out-of-memory killer, or somebody's kill -9)",
        "SIGBUS": " (a data shard was cut short while it was mapped, or the disk failed: `make data` checks)",
    }.get(name, "")
    return f"killed by {name}{hint}"


class StopAsked(BaseException):
    """A signal asked the study to stop."""


class Session:
    """asked: how many requests to stop there were. lock: the descriptor that holds the study's lock.

    The first request is passed on to the run, which saves. A second SIGINT ends the run at once; further SIGTERMs and
    SIGHUPs, and a first SIGINT after them, change nothing, since a supervisor, make and a terminal may each send their
    own.
    """

    def __init__(self) -> None:
        self.asked, self._interrupts = 0, 0
        self.lock: int | None = None
        self._child: Child | None = None
        self._closing = False

    @contextlib.contextmanager
    def process(self, arguments: list[str], log: Path) -> Iterator[Child]:
        """A training process that is never left behind; StopAsked where a request came before it."""
        if self.asked:
            raise StopAsked
        self._child = Child(arguments, log, self.lock)
        try:
            yield self._child
        finally:
            if self._child.process.poll() is None:
                self._child.stop()
            self._child = None

    def close(self) -> None:
        """From here on the study is stopping: requests to do so are heard already."""
        self._closing = True

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to SIGINT, SIGTERM and SIGHUP in the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._closing:
            return
        self.asked += 1
        self._interrupts += number == signal.SIGINT
        if self._child is None:
            raise StopAsked
        if number == signal.SIGINT and self._interrupts > 1:
            self._child.kill()
            return
        if self.asked == 1 or number == signal.SIGINT:
            once_more = "once more" if self._interrupts else "twice"
            print(f"\nstopping: the step is finished and saved (Ctrl-C {once_more}: at once)", flush=True)
        if self.asked == 1:
            self._child.process.send_signal(signal.SIGTERM)
