"""A folder with the project's code and a study of seconds: configure, start, disturb, compare."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from runtime import run_record
from tests.checkout import link_project
from tests.shared_folder import data_folder
from tests.small_runs import write_texts

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).with_name("inject")
STUDY = "gpt2-ra-ablation-smoke"
PATIENCE_SECONDS = 300.0  # a hanging command fails instead of stopping the tests
SETTINGS = {
    "VARIANTS": "B",
    "SEEDS": "1",
    "GPT2_MAX_ITERS": "40",
    "EFFECTIVE_BATCH": "4",
    "MICRO_BATCH": "2",
    "GPT2_BLOCK_SIZE": "16",
    "EVAL_TOKENS": "128",
    "EVAL_INTERVAL_TOKENS": "640",
    "HELLASWAG": "n",
    "CPU_THREADS": "1",
    "CHECKPOINT_SECONDS": "1",
}


class Workplace:
    """One folder with a configured study. Commands run in separate processes."""

    name, spec, settings = STUDY, f"{STUDY}+cpu", SETTINGS

    def __init__(self, folder: Path, texts: Path, **changes: str) -> None:
        self.folder, self.texts = folder, texts
        folder.mkdir(parents=True, exist_ok=True)
        link_project(folder)
        self.configure(**changes)

    @property
    def study(self) -> Path:
        return self.folder / "results" / self.name

    def run_dir(self, name: str = "B0") -> Path:
        return self.study / "runs" / name

    def configure(self, **changes: str) -> None:
        texts = {"DATASET_FILES": str(self.texts / "*.txt")} if self.name == STUDY else {}
        values = self.settings | data_folder() | texts | changes
        assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
        done = self.here("scripts.kconfig", "defconfig", self.spec, *assignments)
        assert done.returncode == 0, done.stdout

    def environment(self, **extra: str) -> dict[str, str]:
        saved = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        return saved | {"RA_DETECTED": "cpu", "PYTHONUNBUFFERED": "1"} | extra

    def start(self, *arguments: str, prefix: tuple[str, ...] = (), **extra: str) -> subprocess.Popen[str]:
        """Start a command of the project with its output on a pipe. extra: environment variables."""
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", *(arguments or ("scripts.study",))],
            cwd=self.folder,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def command(
        self, *arguments: str, prefix: tuple[str, ...] = (), **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Returns its status and its output."""
        process = self.start(*arguments, prefix=prefix, **extra)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def here(self, module: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in this process, without the seconds in which a process loads torch.

        The training processes that it starts are processes. Returns its status and its output.
        """
        output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        folder, words, variables, threads = Path.cwd(), sys.argv, dict(os.environ), torch.get_num_threads()
        status: Any = 0
        try:
            os.chdir(self.folder)
            sys.argv = [module, *arguments]
            _set_environment(self.environment(**extra))
            with (
                warnings.catch_warnings(action="ignore", category=RuntimeWarning),  # it was imported before
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
                mock.patch.object(os, "_exit", sys.exit),  # of scripts.train
            ):
                runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        finally:
            os.chdir(folder)
            sys.argv = words
            _set_environment(variables)
            torch.set_num_threads(threads)
        output.seek(0)
        return subprocess.CompletedProcess([module, *arguments], status, output.read())

    def make(self, fault: dict[str, Any] | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run `make`. fault: injected into its training processes, whose steps are then slow.

        A fault that sends signals to the study needs a study in a process. Any other study runs in this one.
        """
        wait_for(self.unlocked)  # processes of an earlier study may end a moment later
        actions = fault["action"].split() if fault else []
        run = self.here if {"oom", "nan", "spike", "kill"}.issuperset(actions) else self.command
        return run("scripts.study", **(injected(fault) if fault else {}), **extra)

    def record(self, name: str = "B0") -> dict[str, Any]:
        return run_record.load(self.run_dir(name)).to_json()

    def status(self, name: str = "B0") -> str:
        try:
            return run_record.load(self.run_dir(name)).status
        except run_record.RecordError as error:
            return str(error)

    def numbers(self, name: str = "B0") -> dict[str, Any]:
        """Return the numbers of a run that must not depend on interruptions."""
        record = self.record(name)
        return {
            "status": record["status"],
            "iterations": record["progress"]["iterations"],
            "validation": [[tokens, loss] for tokens, _, loss in record["validation"]["history"]],
            "learned": record["learned"],
            "fingerprint": record["fingerprint"],
            "losses": [
                [line["iteration"], line["loss"]] for line in self.metrics(name) if line["event"] == "train"
            ],
        }

    def metrics(self, name: str = "B0") -> list[dict[str, Any]]:
        path = self.run_dir(name) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads((self.study / "plan.json").read_text())
        return plan

    def steps(self, name: str = "B0") -> int:
        """Return the present number of steps in metrics.jsonl."""
        path = self.run_dir(name) / "metrics.jsonl"
        return path.read_bytes().count(b'"event": "train"') if path.exists() else 0

    def checkpoints(self, name: str = "B0") -> list[Path]:
        folder = self.run_dir(name) / "checkpoint"
        return sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []

    def unlocked(self) -> bool:
        """Return whether no process holds the lock of the study."""
        lock = self.study / "lock"
        if not lock.exists():
            return True
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def orphans(self) -> list[str]:
        """Return the training and tracking processes that still run in this folder."""
        return [
            words for _, words in self._processes() if "scripts.train" in words or "study.trackers" in words
        ]

    def kill(self, named: str) -> None:
        """Send SIGKILL to the processes in this folder with `named` in their arguments."""
        self.send(signal.SIGKILL, named)

    def send(self, number: int, named: str) -> None:
        for process, words in self._processes():
            if named in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def _processes(self) -> Iterator[tuple[int, str]]:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                here = (path / "cwd").resolve() == self.folder.resolve()
            except OSError:
                continue
            if here:
                yield int(path.name), words


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def injected(fault: dict[str, Any] | None, slower: float = 0.05) -> dict[str, str]:
    """Return the environment that slows training steps and injects the fault."""
    paths = [str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "STEP_SECONDS": str(slower),
        "FAULT": json.dumps(fault or {}),
    }


def write_stories(folder: Path) -> Path:
    return write_texts(folder, "the dog {} ran to the hill. ", 20)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for a condition. AssertionError after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not occur in time"
        time.sleep(0.02)
