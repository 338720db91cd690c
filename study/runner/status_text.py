"""What a study says of its plan and of a run that ended, in lines for the terminal. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from study.analysis.timing import told_margin
from study.runner.terminal import duration, short


def expected_seconds(plan: dict[str, Any]) -> float | None:
    """Training seconds of an average run, as planned; None where no time budget asked for timing."""
    counts = [
        row["iterations"] * plan["classes"][row["class"]]["seconds_per_iteration"]
        for row in plan["variants"].values()
        if row["class"] in plan["classes"]
    ]
    return sum(counts) / len(counts) if counts else None


def summary(plan: dict[str, Any], variants: Sequence[str], left: int, runs: int) -> str:
    """The batch, every variant's iterations, and what is left of the runs."""
    batch, each = plan["batch"], expected_seconds(plan)
    counts = ", ".join(f"{name} {plan['variants'][name]['iterations']}" for name in variants)
    longer = f" ({plan['extended']:g} times the first budget)" if "extended" in plan else ""
    head = "".join(f"{line}\n" for line in told_margin(plan))
    return head + (
        f"batch {batch['effective']} sequences of {batch['block_size']} tokens "
        f"= micro {batch['micro']} x accumulation {batch['accumulation']}; iterations: {counts}{longer}\n"
        f"{left} of {runs} runs to do" + (f", about {duration(left * each)} of training" if each else "")
    )


def outcome(run_dir: Path) -> str:
    """A finished run in a line, or why it is not."""
    try:
        seen = run_record.load(run_dir)
    except run_record.RecordError as error:
        return str(error)
    if seen["status"] != "finished":
        return f"{seen['status']}: {seen['error']}"
    parts = [f"perplexity {seen['validation']['perplexity'] or float('nan'):.2f}"]
    if seen["hellaswag"] and "acc" in seen["hellaswag"]:
        parts.append(f"HellaSwag {seen['hellaswag']['acc']:.1%} +- {seen['hellaswag']['acc_stderr']:.1%}")
    parts.append(
        f"{short(seen['progress']['tokens'])} tokens in {duration(seen['clock']['train'])} of training"
    )
    if seen["throughput"]["tokens_per_second"]:
        parts.append(f"{seen['throughput']['tokens_per_second']:,.0f} tok/s")
    parts.append(f"{seen['memory']['peak_allocated_bytes'] / 2**30:.2f} GiB")
    return "  ".join(parts)
