"""Start, query and stop worker processes. Every measurement of the benches outside this process goes through here."""

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
from typing import Any, Self

from bench.cases import PLAIN, Shape
from gpt2.system.errors import UserError
from study.runner.child_process import KEEP_HEAP, exit_text

COMMAND = (sys.executable, "-m", "bench.worker")
TIMED_CASE = "bench.case_step:serve"
SLOWER = 10  # limit of a turn as a multiple of its seconds; a case times at least one sample, however long
FIRST_ANSWER_SECONDS = 600.0  # added before the first answer: the worker loads torch and compiles
LATER_ANSWER_SECONDS = 300.0  # added to later turns
EXIT_SECONDS = 60.0  # until a worker that gets no more requests is killed
# The line of an exception in Python's traceback, or the line of gpt2.system.errors.run_command.
EXCEPTION = re.compile(r"(?:error|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?::|$)")
MESSAGE_LINES, MESSAGE_CHARACTERS = 3, 600


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


def last_message(stderr: str) -> str:
    """Extract the last exception and up to two lines after it, or the last lines where there is no exception.

    torch prints advice after an exception. The advice alone does not name the error.
    """
    stderr = stderr.partition("\nException ignored ")[0]  # from an interpreter that is already shutting down
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    at = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    chosen = lines[at[-1] :][:MESSAGE_LINES] if at else lines[-MESSAGE_LINES:]
    return " / ".join(line.strip() for line in chosen)[:MESSAGE_CHARACTERS] or "no message"


def worker_env(heap: str | None) -> dict[str, str]:
    """Return the environment of a worker. Variables set by the user take precedence.

    heap: GLIBC_TUNABLES of the worker. Compiled kernels are cached on disk (torch's default, which a site may change),
    so that only the first worker of a case on a GPU compiles them.
    """
    defaults = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    return defaults | ({"GLIBC_TUNABLES": heap} if heap else {}) | os.environ


def heap_of(case: str) -> str | None:
    """Return the heap settings of a case: those of a training process, none for the plain case."""
    return None if case == PLAIN else KEEP_HEAP


def case_label(shape: Shape, case: str, micro: int) -> str:
    return f"{shape.name}, {case} at micro-batch {micro}"


class Worker:
    """One function in a separate process (bench.worker). Leaving the context ends the process.

    target: "module:function". arguments: of the function, as JSON. heap: see `worker_env`.
    """

    def __init__(self, label: str, target: str, arguments: dict[str, Any], heap: str | None = None) -> None:
        self.label = label
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*COMMAND, target, json.dumps(arguments)],
            env=worker_env(heap),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        # A thread reads the pipe: a compiler started by the worker can keep the pipe open after the worker's end.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, limit_seconds: float | None = None, request: str = "") -> dict[str, Any]:
        """Send a request, if any, and return the next JSON object on the worker's stdout. Skip other lines.

        BenchError, with the end of its stderr, if the worker ends without an answer or exceeds the limit. A worker that
        exceeds the limit is killed.
        """
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):  # the process may be gone, or its pipe closed
            self.process.stdin.write(request)
            self.process.stdin.flush()
        end = None if limit_seconds is None else time.monotonic() + limit_seconds
        try:
            while (line := self._next_line(None if end is None else end - time.monotonic())) is not None:
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
            self.close()
            status = self.process.returncode
            reason = f"{exit_text(status)}; last message: " if status < 0 else ""
        except queue.Empty:
            self.process.kill()
            self.close()
            reason = f"no answer within {limit_seconds:,.0f} s, so it was killed; last message: "
        self._stderr.seek(0)
        raise BenchError(f"{self.label}: {reason}{last_message(self._stderr.read())}")

    def _next_line(self, seconds: float | None) -> str | None:
        """Return the next line of stdout, None after the last one. queue.Empty if none arrives in time."""
        line = self._lines.get(timeout=None if seconds is None else max(seconds, 0.0))
        if line is None:
            self._lines.put(None)  # later calls find the end as well
        return line

    def close(self) -> None:
        """End the process by closing its stdin. Kill it if it does not exit within EXIT_SECONDS."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class CaseWorker(Worker):
    """One case, warmed up in a separate process."""

    def __init__(self, shape: Shape, case: str, micro: int) -> None:
        arguments = {"shape": asdict(shape), "case": case, "micro": micro}
        super().__init__(case_label(shape, case, micro), TIMED_CASE, arguments, heap_of(case))
        self._extra_seconds = FIRST_ANSWER_SECONDS

    def time_steps(self, seconds: float) -> dict[str, Any]:
        """Time steps for so many seconds, at least one. Returns the fields of Sample except case, micro and round."""
        found = self.answer(SLOWER * seconds + self._extra_seconds, f"{seconds}\n")
        self._extra_seconds = LATER_ANSWER_SECONDS
        return found


def call_in_worker(
    label: str,
    target: str,
    arguments: dict[str, Any],
    heap: str | None = None,
    limit_seconds: float | None = None,
) -> dict[str, Any]:
    """Call one function in a new worker and return its result."""
    with Worker(label, target, arguments, heap) as worker:
        return worker.answer(limit_seconds)


def measure_in_new_worker(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """Measure one turn of a case in a new worker, so that one case at a time occupies the GPU."""
    with CaseWorker(shape, case, micro) as worker:
        return worker.time_steps(seconds)


class PersistentWorkers:
    """Measure like `measure_in_new_worker`, but reuse each worker for later turns. A turn can be a single step.

    Short turns bring the steps of a ratio close together in time, so that less drift of the machine falls between them.
    All workers are in memory at once. Not for the plain case: it frees and takes fresh pages in every step, and on
    a virtual machine it lost a third of its speed beside persistent workers.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[Shape, str, int], CaseWorker] = {}

    def __call__(self, shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        key = (shape, case, micro)
        if key not in self._workers:
            self._workers[key] = CaseWorker(*key)
        return self._workers[key].time_steps(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers.values():
            worker.close()
