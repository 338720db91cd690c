"""`make bench PRODUCTS=1`: the two libraries' products on a CPU in turn; WIDE and HEAD_WIDE were chosen by them.

python -m scripts.bench_products [--rounds N] [--shape WIDTH]   writes results/bench-products.json
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command
from scripts.bench import at_least, keep
from study.bench_table import told
from study.runner.child_process import keep_heap

OUT = Path("results/bench-products.json")
WIDTHS = (64, 128, 192, 256, 320, 384, 512, 768, 1024)
ROWS = 1024  # of a layer's input
PARTS = ("qkv", "fc", "head")


@dataclass(frozen=True)
class Row:
    """Speed of oneDNN's product over F.linear's, as study.bench.spread has it, and FLOP/s of each (median)."""

    width: int
    part: str
    rows: int
    columns: int
    ratio: dict[str, float]
    usual_flops: float
    onednn_flops: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench PRODUCTS=1")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", default="", help="one width only")
    arguments = parser.parse_args()
    export_environment()
    from gpt2.config.config import TargetConfig
    from gpt2.hardware import resolve
    from gpt2.hardware.cpu import cpu_threads
    from gpt2.model import cpu_linear
    from study.bench import INTERVAL

    at_least(1, arguments.rounds)
    if arguments.shape and not arguments.shape.isdecimal():
        raise UserError(f"--shape {arguments.shape!r}; right: a width, such as {WIDTHS[-2]}")
    if not cpu_linear.offered():
        raise UserError("this torch has no oneDNN product to compare with; training uses F.linear throughout")
    cpu = TargetConfig("cpu", "float32", False, 0, "auto", False)
    resolved = resolve.resolve(cpu)
    widths = [int(arguments.shape)] if arguments.shape else WIDTHS
    print(f"{resolved.device_name}, float32, {cpu_threads(0)} threads")
    import torch

    torch.set_num_threads(cpu_threads(0))
    rows = []
    for width in widths:
        rows += measure(width, arguments.rounds)
        print(text(rows[-len(PARTS) :], head=width == widths[0]), flush=True)
    print(
        f"Ratio: speed of oneDNN's product over F.linear's within a round, median [{INTERVAL}]. "
        f"oneDNN's is used from width {cpu_linear.WIDE} on, in the head from {cpu_linear.HEAD_WIDE}."
    )
    keep(OUT, resolved, {"rows": [dataclasses.asdict(row) for row in rows]})
    return 0


def measure(width: int, rounds: int) -> list[Row]:
    """The products that widen, at one width: of a layer into query, key and value, into the MLP, and of the head."""
    import torch
    import torch.nn.functional as F

    from gpt2.config.config import VOCABULARY
    from gpt2.model import cpu_linear
    from gpt2.model.loss import CHUNK_ROWS
    from study.bench import spread

    found = []
    sizes = ((ROWS, 3 * width), (ROWS, 4 * width), (CHUNK_ROWS["cpu"], VOCABULARY))
    for part, (N, M) in zip(PARTS, sizes, strict=True):
        generator = torch.Generator().manual_seed(0)
        x_NC = torch.randn(N, width, generator=generator)
        weight_MC = torch.randn(M, width, generator=generator)
        out_NM = torch.empty(N, M)
        usual: Callable[[], Any] = lambda: F.linear(x_NC, weight_MC)  # noqa: B023, E731
        if part == "head":  # into memory that is there, as the loss does it
            usual = lambda: torch.mm(x_NC, weight_MC.T, out=out_NM)  # noqa: B023, E731
        times: list[tuple[float, float]] = []
        for _ in range(rounds + 1):  # the first one settles caches and kernels
            times.append((seconds(usual), seconds(lambda: cpu_linear.product(x_NC, weight_MC))))  # noqa: B023
        ratio = spread([a / b for a, b in times[1:]])
        assert ratio
        flops = [2 * N * M * width / sorted(each)[rounds // 2] for each in zip(*times[1:], strict=True)]
        found.append(Row(width, part, N, M, ratio, *flops))
    return found


def seconds(work: Callable[[], Any]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def text(rows: list[Row], head: bool) -> str:
    """The rows for a reader."""
    lines = [f"{'width':>5}  {'product':7}  {'F.linear':>12}  {'oneDNN':>12}  ratio"] if head else []
    for row in rows:
        speeds = "  ".join(f"{flops / 1e9:5.0f} GFLOP/s" for flops in (row.usual_flops, row.onednn_flops))
        lines.append(f"{row.width:5}  {row.part:7}  {speeds}  {told(row.ratio)}")
    return "\n".join(lines)


if __name__ == "__main__":
    keep_heap()
    run_command(main)
