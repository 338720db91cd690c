"""Synthetic studies to compare, which differ in one respect."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from referee.pages.document import render_markdown, render_terminal
from referee.pages.html_page import render_html
from runtime import run_record
from study.compare.compare_page import comparison_document
from study.compare.compared_studies import StudyComparison
from tests.checked_files import write_checked
from tests.study.sample_records import with_derived

ROOT = Path(__file__).parents[2]
VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
CONFIG = {
    "STUDY_NAME": '"one"', "VARIANTS": '"B RAEARLY RALATE RAALL RALEARN"', "SEEDS": "2",
    "GPT2_MODEL_124M": "y", "GPT2_MODEL_MINI": "n", "GPT2_BLOCK_SIZE": "64", "GPT2_DROPOUT": '"0.0"',
    "GPT2_MAX_TIME": "60", "EFFECTIVE_BATCH": "8", "MICRO_BATCH": "0", "COMPILE": "y", "CPU_THREADS": "0",
    "LEARNING_RATE": '"6e-4"', "MIN_LEARNING_RATE_RATIO": '"0.1"', "WARMUP_FRACTION": '"0.02"',
    "WEIGHT_DECAY": '"0.1"', "ADAM_BETA1": '"0.9"', "ADAM_BETA2": '"0.95"', "ADAM_EPSILON": '"1e-8"',
    "GRAD_CLIP": '"1.0"', "SCHEDULE_COSINE": "y", "DATASET_EMBEDDED": "y", "DATA_WORKERS": "0",
    "HELLASWAG": "n", "EVAL_TOKENS": "4096",
    "ALTERNATION_MIX_OUTPUT": "y", "ALTERNATION_MIX_SCORE": "n", "ALTERNATION_INIT": '"0.5"',
}  # fmt: skip
SCORE = {
    "acc": 0.3,
    "acc_stderr": 0.005,
    "acc_norm": 0.31,
    "acc_norm_stderr": 0.005,
    "items": 10042,
    "items_sha256": "f" * 64,
}
Settings = dict[str, str]
Change = Callable[[dict[str, Any], Settings], None]


def unchanged(value: dict[str, Any], config: Settings) -> None:
    """Return every run unchanged."""


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    hashes = dict.fromkeys(
        ("model", "data", "tokenizer", "batch", "schedule", "validation"), "0123456789abcdef"
    )
    return run_record.blank(run_record.run_name(name, seed), name, seed).to_json() | {
        "status": "finished", "commit": "c" * 40, "dirty": False, "config_sha256": "d" * 64,
        "fingerprint": hashes | {"initial_weights": f"{seed}23456789abcdef", "numbers": 1},
        "target": {
            "name": "a100-40g", "device": "a card", "memory_bytes": 2**34, "dtype": "bfloat16",
            "attention_backend": "flash", "torch": "2.13.0", "driver": "550",
        },
        "environment": {
            "python": "3.11.9", "platform": "Linux x86_64", "numpy": "2.3.1", "cuda": "12.8", "rocm": None,
            "cudnn": "91002", "float32_matmul": "high", "threads": 8, "variables": {},
            "triton": "3.5.0", "deterministic": False,
            "code": {},
        },
        "batch": {"effective": 8, "micro": 4, "accumulation": 2, "world_size": 1, "block_size": 64},
        "parameters": 1000,
        "progress": {"iterations": 100, "tokens": 51200, "train_seconds": 60.0},
        "validation": {
            "loss": loss, "perplexity": math.exp(loss), "best_perplexity": math.exp(loss), "tokens": 4096,
            "bytes": 4096, "bits_per_byte": loss / math.log(2),
            "history": [[25600, 30.0, loss + 1], [51200, 60.0, loss]],
        },
        "schedule": {"iterations": 100, "cut": False},
    }  # fmt: skip


def put(folder: Path, value: dict[str, Any], config: Settings | None, curve: dict[int, float] | None) -> None:
    run_dir = folder / "runs" / value["run"]
    run_dir.mkdir(parents=True)
    run_record.from_json(value)
    if config is not None:
        text = "".join(
            f"CONFIG_{n}={v}\n" if v != "n" else f"# CONFIG_{n} is not set\n" for n, v in config.items()
        )
        (run_dir / "config").write_text(text)
    lines = [
        {"event": "train", "iteration": k, "tokens": k, "train_seconds": 1.0, "loss": loss}
        for k, loss in (curve or {}).items()
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_checked(run_dir / "run.json", with_derived(value))


def a_study(
    folder: Path,
    change: Change = unchanged,
    *,
    seeds: tuple[int, ...] = (0, 1),
    variants: tuple[str, ...] = VARIANTS,
    noise: int = 0,
    shift: float = 0.0,
    effect: float = -0.2,
) -> Path:
    """Write a study: seeds differ by 0.02 nats, arms by 0.005. noise: seed of the arms. shift: added to all losses."""
    for seed in seeds:
        draw = np.random.default_rng([seed, noise])
        base = 4.0 + 0.02 * np.random.default_rng(seed).normal()
        for name in VARIANTS:
            loss = float(base + 0.005 * draw.normal() + (effect if name == "RALEARN" else 0.0) + shift)
            wander = np.cumsum(0.0005 * draw.normal(size=100))
            if name in variants:
                value, config = a_record(name, seed, loss), dict(CONFIG)
                change(value, config)
                steps = range(1, value["progress"]["iterations"] + 1)
                curve = {k: float(4 + 7 / k + wander[min(k, 100) - 1]) for k in steps}
                put(folder, value, config, curve)
    return folder


def recorded(*path: str, to: Any) -> Change:
    """A change of one place of every record."""

    def change(value: dict[str, Any], config: Settings) -> None:
        for key in path[:-1]:
            value = value[key]
        assert value.get(path[-1]) != to
        value[path[-1]] = to

    return change


def setting(to: Settings) -> Change:
    return lambda value, config: config.update(to)


def markdown(comparison: StudyComparison) -> str:
    """compare.md."""
    return render_markdown(comparison_document(comparison))


def page(comparison: StudyComparison) -> str:
    """compare.html."""
    return render_html(comparison_document(comparison))


def terminal(comparison: StudyComparison) -> str:
    """The text that `make compare` prints."""
    return render_terminal(comparison_document(comparison))
