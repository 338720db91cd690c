"""Start the ranks of a run on this machine, pass requests to stop on to them, and report how they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from gpt2.system.ranks import EXIT_RANK_LOST
from gpt2.system.signals import Stop

GRACE_SECONDS = 30.0  # for the other ranks to end after the first one failed; then SIGKILL
POLL_SECONDS = 0.05


class Rank:
    """One process of the run. Rank 0 has the launcher's standard output; all other output goes to standard error."""

    def __init__(self, number: int, count: int, port: int, command: Sequence[str]) -> None:
        self.number = number
        self.last_line = ""
        variables = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.process = subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in variables.items()} | address,
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if number == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,  # the ranks hold the study's lock, too
        )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def _copy_output(self) -> None:
        for line in self.process.stderr or self.process.stdout or ():
            self.last_line = line.strip() or self.last_line
            print(line, end="", file=sys.stderr, flush=True)

    def wait(self) -> None:
        self.process.wait()
        self._reader.join(timeout=GRACE_SECONDS)  # a process that the rank started may keep the pipe open


def launch(count: int, command: Sequence[str], stop: Stop) -> int:
    """Run `count` ranks of the command to their end. Return the exit status of the rank that ended the run.

    That is the first that failed otherwise than by the loss of another rank; negative where a signal ended it. Its last
    line is repeated on standard error.
    """
    port = free_port()
    ranks = [Rank(number, count, port, command) for number in range(count)]
    cause: Rank | None = None
    deadline, passed_on = float("inf"), False
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.poll()]
        cause = cause or _cause(failed)
        if not running:
            break
        if stop.requested and not passed_on:
            passed_on = True
            for rank in running:
                rank.process.send_signal(signal.SIGTERM)
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in running:
                rank.process.kill()
            break
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        rank.wait()
    cause = cause or next((rank for rank in ranks if rank.process.returncode == EXIT_RANK_LOST), None)
    if cause is None:
        return 0
    status = cause.process.returncode
    if status < 0:
        print(f"error: rank {cause.number} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    elif cause.last_line.startswith("error: "):
        print(cause.last_line, file=sys.stderr)
    return status


def _cause(ranks: Sequence[Rank]) -> Rank | None:
    """Return the rank that a signal ended, else the first that failed otherwise than by the loss of another."""
    causes = [rank for rank in ranks if rank.process.returncode != EXIT_RANK_LOST]
    return min(causes, key=lambda rank: (rank.process.returncode > 0, rank.number), default=None)


def end_like(status: int) -> int:
    """Return an exit status; where it is negative, end this process by that signal."""
    if status < 0:
        number = signal.Signals(-status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        sys.stderr.flush()
        os.kill(os.getpid(), number)
    return status


def free_port() -> int:
    """Return a port of this host that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
