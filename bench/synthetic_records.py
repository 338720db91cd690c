"""Write synthetic run records, to measure planning and reporting. Their notes and commit mark them as synthetic.

Only a bench uses them, in a temporary folder. Needs no torch.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from gpt2.system import files

NOTE = "synthetic record of make bench, written to measure reporting; no model was trained"
EVALUATIONS, UPDATE_TOKENS = 20, 512 * 1024
FINGERPRINT = ("model", "data", "tokenizer", "batch", "schedule", "validation")


def synthetic_record(variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Return a finished record by run.schema.json. Its numbers depend on (variant, seed) only."""
    draw = random.Random(f"{variant} {seed}")
    loss = 4.0 + draw.gauss(0, 0.02)
    points = [steps * UPDATE_TOKENS * place // EVALUATIONS for place in range(1, EVALUATIONS + 1)]
    history = [[point, point / UPDATE_TOKENS, loss + 5 * (1 - point / points[-1]) ** 2] for point in points]
    values: dict[str, Any] = {
        "status": "finished",
        "commit": "synthetic",
        "dirty": False,
        "config_sha256": "synthetic",
        "fingerprint": dict.fromkeys(FINGERPRINT, "synthetic") | {"initial_weights": f"seed {seed}"},
        "target": {"name": "cpu", "device": "synthetic", "memory_bytes": 2**34, "dtype": "float32",
                   "attention_backend": "flash", "torch": None, "driver": None},
        "batch": {"effective": 512, "micro": 32, "accumulation": 16, "world_size": 1, "block_size": 1024},
        "parameters": 124_439_808,
        "progress": {"iterations": steps, "tokens": points[-1], "train_seconds": float(steps)},
        "clock": {"train": float(steps), "compile": 40.0, "evaluate": 90.0, "checkpoint": 9.0, "data": 1.0},
        "validation": {"loss": loss, "perplexity": math.exp(loss), "best_perplexity": math.exp(loss),
                       "tokens": 2**17, "history": history},
        "hellaswag": {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005, "items": 10042},
        "memory": {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31, "predicted_bytes": None,
                   "by_phase": {"forward": 1, "backward": 1, "optimizer": 1}},
        "throughput": {"tokens_per_second": float(UPDATE_TOKENS), "mfu": 0.4},
        "schedule": {"iterations": steps, "cut": False},
        "notes": [NOTE],
    }  # fmt: skip
    if variant == "RALEARN":
        path = [[point, [0.5 + 0.01 * draw.random() for _ in range(12)]] for point in points]
        values["learned"] = {"alternation_probability": path[-1][1], "history": path}
    return run_record.blank(run_record.run_name(variant, seed), variant, seed).to_json() | values


def write_runs(study_dir: Path, variants: tuple[str, ...], seeds: int, steps: int) -> int:
    """Write run.json and metrics.jsonl (one line a step) of every variant and seed. Returns the number of runs."""
    for seed in range(seeds):
        lines = _metrics(random.Random(seed), steps)
        for variant in variants:
            value = synthetic_record(variant, seed, steps)
            run_dir = study_dir / "runs" / value["run"]
            run_dir.mkdir(parents=True)
            files.write_json(run_dir / "run.json", run_record.from_json(value).to_json())
            (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return seeds * len(variants)


def _metrics(draw: random.Random, steps: int) -> str:
    """Return the metrics of one seed, the same for all variants."""
    lines = [
        {"event": "train", "iteration": step, "tokens": step * UPDATE_TOKENS, "train_seconds": float(step),
         "loss": 4.0 + 6.0 / step + draw.gauss(0, 0.05), "gradient_norm": 1.0 + draw.random(),
         "learning_rate": 6e-4, "tokens_per_second": 5e5}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)
