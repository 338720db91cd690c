"""Studies of synthetic records for the tests of pages."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from referee.verdict.design import Design
from runtime import run_record
from runtime.metrics_log import append_metrics
from runtime.records import to_plain
from study.runs import FinishedRecord, Run
from tests.checked_files import rows_of, write_checked

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
STEPS = 300
UPDATE = 512 * 1024  # tokens
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.9", "platform": "Linux x86_64", "numpy": "2.3.1", "cuda": "12.8", "rocm": None, "cudnn": "91002",
    "float32_matmul": "high", "threads": 8, "variables": {}, "triton": None, "deterministic": False,
    "code": {"ra.custom.mine": "aaaaaaaaaaaaaaaa", "ra.custom.parts": "cccccccccccccccc"},
}  # fmt: skip


def a_record(name: str, seed: int, loss: float, steps: int = STEPS) -> dict[str, Any]:
    """A run that ended after `steps`, with evaluations every sixth of STEPS and at its end."""
    keys = ("model", "data", "tokenizer", "batch", "schedule", "validation")
    grid = [UPDATE * step for step in range(STEPS // 6, steps, STEPS // 6)] + [UPDATE * steps]
    history = [[tokens, tokens / UPDATE * 10.0, loss + 5 * (1 - tokens / grid[-1]) ** 2] for tokens in grid]
    return run_record.blank(run_record.run_name(name, seed), name, seed).to_json() | {
        "status": "finished",
        "commit": "c" * 40,
        "dirty": False,
        "config_sha256": "d" * 64,
        "fingerprint": dict.fromkeys(keys, "e" * 64) | {"initial_weights": f"seed{seed}", "numbers": 1},
        "target": {"name": "cpu", "device": "a processor", "memory_bytes": 2**34, "dtype": "float32",
                   "attention_backend": "flash", "torch": "2.13.0", "driver": None},
        "environment": ENVIRONMENT,
        "batch": {"effective": 512, "micro": 32, "accumulation": 16, "world_size": 1, "block_size": 1024},
        "parameters": 124439808,
        "progress": {"iterations": steps, "tokens": steps * UPDATE, "train_seconds": steps * 10.0},
        "clock": {"train": steps * 10.0, "compile": 40.0, "evaluate": 90.0, "checkpoint": 9.0, "data": 1.0},
        "validation": {"loss": loss, "perplexity": math.exp(loss), "best_perplexity": math.exp(loss), "tokens": 4096,
                       "bytes": 4096, "bits_per_byte": loss / math.log(2), "history": history},
        "memory": {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31, "predicted_bytes": None,
                   "by_phase": {"forward": 1, "backward": 1, "optimizer": 1}},
        "throughput": {"tokens_per_second": 52428.8, "mfu": 0.4},
        "schedule": {"iterations": steps, "cut": False},
    }  # fmt: skip


def a_study(
    study: Path,
    seeds: int = 3,
    effect: float = 0.0,
    variants: tuple[str, ...] = VARIANTS,
    hellaswag: bool = True,
    ends: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Seeds differ by 0.02 nats, runs of one seed by 0.005; RALEARN differs by `effect`.

    ends: the last step of each variant that does not end at STEPS.
    """
    draw = np.random.default_rng(0)
    for seed in range(seeds):
        base = 4.0 + 0.02 * float(draw.normal())
        for name in variants:
            loss = base + 0.005 * float(draw.normal()) + effect * (name == "RALEARN")
            value = a_record(name, seed, loss, ends.get(name, STEPS))
            if name == "RALEARN":
                path = [[tokens, [0.5 - 0.001 * place * (layer - 1.5) for layer in range(4)]]
                        for place, (tokens, _, _) in enumerate(value["validation"]["history"])]  # fmt: skip
                value["learned"] = {"alternation_probability": path[-1][1], "history": path}
            if hellaswag:
                value["hellaswag"] = {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005,
                                      "items": 10042, "items_sha256": "f" * 64}  # fmt: skip
            run_dir = study / "runs" / value["run"]
            run_dir.mkdir(parents=True)
            with (run_dir / "metrics.jsonl").open("w") as file:
                for step in range(1, ends.get(name, STEPS) + 1):
                    line = {"event": "train", "iteration": step, "tokens": step * UPDATE, "train_seconds": step * 10.0,
                            "loss": 4.0 + 6.0 / step + 0.05 * float(draw.normal())}  # fmt: skip
                    append_metrics(file, line)
            write_checked(run_dir / "run.json", value)
    return study


def a_run(value: dict[str, Any]) -> Run:
    """Return a run with this record as a study's reader does."""
    record, name = run_record.from_json(value), value["run"]
    rows = tuple(rows_of(Path("study/runs") / name, record))
    complete = cast("FinishedRecord", record)
    return Run(name, value["variant"], value["seed"], "finished", True, record=complete, rows=rows)


def edit(study: Path, run: str, **changes: Any) -> None:
    """Replace entries of a run's record; a dict is merged into the entry that is there."""
    path = study / "runs" / run / "run.json"
    value = json.loads(path.read_text())
    for key, change in changes.items():
        value[key] = value[key] | change if isinstance(change, dict) and value.get(key) else change
    write_checked(path, with_derived(value))


def with_derived(value: dict[str, Any]) -> dict[str, Any]:
    """The record, with the numbers that follow from its loss: the end of the history and the perplexities."""
    validation = value["validation"]
    if validation and validation["history"] and validation["loss"] is not None:
        validation["history"][-1][-1] = validation["loss"]
        losses = [loss for _, _, loss in validation["history"] if loss is not None]
        validation["perplexity"] = math.exp(validation["loss"])
        validation["best_perplexity"] = math.exp(min(losses))
        nats = validation["loss"] * validation["tokens"]
        validation["bits_per_byte"] = nats / math.log(2) / validation["bytes"]
    return value


def a_design(looks: Sequence[int] = (3,), margin: float = 0.01, **later: Any) -> dict[str, Any]:
    """The design of such a study and its later looks, as entries of plan.json."""
    first, *others = looks
    design = Design(VARIANTS[:-1], ("RALEARN",), "RALEARN", tuple(range(first)), (first,), margin)
    return {"design": to_plain(design.hashed), "later_looks": list(others), **later}


def a_plan(iterations: int = STEPS, **content: Any) -> dict[str, Any]:
    """plan.json of such a study: RALEARN is of cost class "learned", the others of "standard"."""
    rows = {
        name: {"class": "learned" if name == "RALEARN" else "standard", "iterations": iterations,
               "tokens": iterations * UPDATE}
        for name in VARIANTS
    }  # fmt: skip
    limits = ("max_time_seconds", "max_tokens", "max_iterations", "hard_limit_seconds")
    return {
        "schema": 1,
        "batch": {"effective": 512, "micro": 32, "accumulation": 16, "world_size": 1, "block_size": 1024},
        "budget": dict.fromkeys(limits, 0) | {"equal_time": False},
        "classes": {},
        "variants": rows,
        "notes": [],
    } | content
