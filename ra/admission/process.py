"""Examine variants in processes of their own, within a time limit: user code may hang or crash.

A second process with another seed of Python's hash builds the same models; the check "process" compares them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ra import arms
from ra.admission.results import (
    FAILED,
    PASSED,
    PROCESS,
    Examination,
    Outcome,
    Violation,
)
from runtime.records import Record, parse
from runtime.settings import AlternationSettings, ModelConfig

LIMIT_SECONDS = 300.0  # of one variant; an examination takes seconds on an idle machine
NO_RESULT = "it gave no result within the time limit"
ROOT = Path(__file__).parents[2]
OUTPUT_ROUNDING = 1e-5  # relative; a float32 output may depend on the alignment of its memory


class Request(Record, frozen=True):
    """The task of a child process. examine: run the checks; else build and digest alone. autocast: bfloat16."""

    names: tuple[str, ...]
    model: ModelConfig
    alternation: AlternationSettings
    autocast: bool
    examine: bool
    custom_folder: str
    count_costs: bool = False


class _Child:
    """A process of ra.admission.child and the events that it wrote."""

    def __init__(self, request: Request, hash_seed: str) -> None:
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ra.admission.child"],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},  # two processes, small shapes
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request.to_json()))
        self.process.stdin.close()

    def events(self, until: float) -> tuple[list[dict[str, Any]], str]:
        """All events, and why the process ended early; "" if it did not."""
        try:
            status = self.process.wait(max(0.1, until - time.monotonic()))
            killed = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
            reason = f"its process {killed}" if status else ""
        except subprocess.TimeoutExpired:
            reason = NO_RESULT
        finally:
            self.close()
        self.output.seek(0)
        lines = [line for line in self.output if line.endswith("\n")]
        return [json.loads(line) for line in lines], reason

    def last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Kill what is left of the process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def examine_variants(
    variants: Sequence[str],
    model: ModelConfig,
    alternation: AlternationSettings,
    autocast: bool = False,
    seconds: float = LIMIT_SECONDS,
    count_costs: bool = False,
) -> dict[str, Examination]:
    """Examine variants. VariantError for one that cannot be loaded. seconds: of one variant."""
    found: dict[str, Examination] = {}
    left = list(variants)
    while left:  # a crash ends the process; the next one continues with the next variant
        request = Request(
            tuple(left), model, alternation, autocast, True, str(arms.CUSTOM_FOLDER), count_costs
        )
        child = _Child(request, "0")
        other = _Child(request.replace(examine=False), "1")
        until = time.monotonic() + seconds * len(left)
        try:
            events, reason = child.events(until)
            others, _ = other.events(until)
            reason += f" of {seconds * len(left):g} s" if reason == NO_RESULT else ""
        finally:
            child.close()
            other.close()
        digests = {event["variant"]: event["digests"] for event in others if "digests" in event}
        running = ("", "")
        for event in events:
            name = event["variant"]
            if "error" in event:
                raise arms.VariantError(event["error"])
            if "examination" in event:
                examination = parse(Examination, event["examination"], "examination")
                found[name] = _with_process(examination, event["digests"], digests.get(name))
                left.remove(name)
            else:
                running = (name, event["check"])
        if not left:
            break
        if not reason and running[0] not in left:
            continue  # the last variant changed its process
        name, check = running if running[0] in left else (left[0], "load")
        found[name] = _died(name, check, reason, child.last_words())
        left.remove(name)
    return {name: found[name] for name in variants}


def _died(name: str, check: str, reason: str, words: str) -> Examination:
    message = f"{reason or 'its process ended without a result'}"
    message += f"; its last output: {words}" if words else ""
    violation = Violation(name, check, message, "run the attention alone in Python, and correct it")
    return Examination(name, (Outcome(check, FAILED, 0.0),), (violation,))


def _with_process(
    examination: Examination, ours: dict[str, Any], theirs: dict[str, Any] | None
) -> Examination:
    """Add the check "process": two processes build the same parameters and compute the same outputs."""
    differing = next((key for key in ours if theirs and not _equal(ours[key], theirs.get(key))), None)
    outcome = Outcome(PROCESS, FAILED if differing else PASSED, 0.0)
    if not ours or not theirs:
        outcome = outcome.replace(result="not examined: the attention does not run")
    violations = examination.violations
    if differing:
        layer, _, part = differing.partition(": ")
        violations += (
            Violation(
                examination.variant,
                PROCESS,
                f"{part} differs between two processes with one seed",
                "draw random numbers with torch only, and use no hash(), id(), set order, time or process number",
                layer=int(layer.removeprefix("layer ")),
            ),
        )
    return examination.replace(outcomes=(*examination.outcomes, outcome), violations=violations)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, str) or not isinstance(theirs, list):
        return bool(ours == theirs)
    scale = max(map(abs, ours), default=0.0)
    return len(ours) == len(theirs) and all(
        one == other or (math.isnan(one) and math.isnan(other)) or abs(one - other) <= OUTPUT_ROUNDING * scale
        for one, other in zip(ours, theirs, strict=True)
    )
