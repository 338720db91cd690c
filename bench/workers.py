"""A case of `make bench` in a process of its own: started, asked for steps, listened to for so long, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from typing import Any

from bench.cases import PLAIN, Shape
from gpt2.system.errors import UserError
from study.runner.child_process import KEEP_HEAP, how_it_ended

COMMAND = (sys.executable, "-m", "scripts.bench", "--case")
SLOWER = (
    10  # times the seconds asked for that a turn may take: a case times one sample at least, however long
)
FIRST_ANSWER, LATER_ANSWER = (
    600.0,
    300.0,
)  # seconds beside those; before the first it loads torch and compiles
ENDING = 60.0  # seconds that a process may take to end when it is asked for nothing more
# An exception's line in what Python writes, or the line of gpt2.system.errors.run_command.
EXCEPTION = re.compile(r"(?:error|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?::|$)")
WORDS, LETTERS = 3, 600  # lines and characters of a case's last words


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


def last_words(said: str) -> str:
    """Of what a process wrote on stderr its last exception's line and up to two behind it, or its last lines.

    torch writes advice behind an exception, which alone says nothing of what went wrong.
    """
    said = said.partition("\nException ignored ")[0]  # of an interpreter that is ending already
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    at = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    kept = lines[at[-1] :][:WORDS] if at else lines[-WORDS:]
    return " / ".join(line.strip() for line in kept)[:LETTERS] or "no message"


def why(status: int, said: str) -> str:
    """What ended a process that was to measure: the signal, if it was one, and its last words."""
    ended = f"{how_it_ended(status)}; last it said: " if status < 0 else ""
    return f"{ended}{last_words(said)}"


def surroundings(case: str) -> dict[str, str]:
    """The environment of a case's process; what is named in ours wins.

    Our cases get the heap of a training process. Kernels compiled once are kept on disk (torch's default, which a
    site may have changed), so that of a case on a GPU only the first process compiles them.
    """
    own = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    if case != PLAIN:
        own["GLIBC_TUNABLES"] = KEEP_HEAP
    return own | os.environ


class Running:
    """A case in a process of its own, warmed up: `steps(seconds)` times steps for so long, at least one.

    Raises BenchError with the process's last words where it fails, and where it does not answer in time, which ends
    it. A context manager that ends the process.
    """

    def __init__(self, shape: Shape, case: str, micro: int) -> None:
        self.name = f"{shape.name}, {case} at micro-batch {micro}"
        asked = json.dumps({"shape": asdict(shape) | {"cases": []}, "case": case, "micro": micro})
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        self._lines: queue.SimpleQueue[str | None] | None = None
        self._patience = FIRST_ANSWER
        self.process = subprocess.Popen(
            [*COMMAND, asked],
            env=surroundings(case),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def steps(self, seconds: float) -> dict[str, Any]:
        """What scripts.bench measured: the fields of Sample beside case, micro and round."""
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):  # it may be gone, or be closed already
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
        limit = SLOWER * seconds + self._patience
        end = time.monotonic() + limit
        try:
            while (line := self._line(end - time.monotonic())) is not None:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        self._patience = LATER_ANSWER
                        return answer
        except queue.Empty:
            self.process.kill()
            self.close()
            raise BenchError(
                f"{self.name}: no answer within {limit:,.0f} s, so it was ended; last it said: "
                f"{last_words(self._stderr())}"
            ) from None
        self.close()
        raise BenchError(f"{self.name}: {why(self.process.returncode, self._stderr())}")

    def _line(self, seconds: float) -> str | None:
        """Its next line, None behind its last; queue.Empty where none comes for so long.

        Read by a thread: what compiles for it may hold its output open after its end, or never end itself.
        """
        if self._lines is None:
            self._lines = queue.SimpleQueue()
            threading.Thread(target=self._listen, args=(self._lines,), daemon=True).start()
        line = self._lines.get(timeout=max(seconds, 0.0))
        if line is None:
            self._lines.put(None)  # it stays the last
        return line

    def _listen(self, lines: queue.SimpleQueue[str | None]) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            lines.put(line)
        lines.put(None)

    def _stderr(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def close(self) -> None:
        """It ends when it is asked for nothing more; where it does not, it is killed."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def in_a_process(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """Measure a case in a process that is new and gone afterwards, so that a card belongs to one at a time."""
    with Running(shape, case, micro) as running:
        return running.steps(seconds)


class Held:
    """Measure as in_a_process, but keep every process for its next turn: a turn can then be a single step.

    The shorter the turns, the closer in time are the steps that a ratio compares, and the less of a machine's drift
    falls between them. For our own cases only: the plain step gives its memory back and takes fresh pages all the
    time, which cost it a third of its speed on a virtual machine while other processes held theirs.
    All cases are in memory at once. A context manager that ends the processes.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[Shape, str, int], Running] = {}

    def __call__(self, shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        key = (shape, case, micro)
        if key not in self._running:
            self._running[key] = Running(shape, case, micro)
        return self._running[key].steps(seconds)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        for running in self._running.values():
            running.close()
        self._running.clear()
