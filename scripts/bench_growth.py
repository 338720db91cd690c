"""`make bench GROWTH=1`: what training costs as the text, the model and the number of recorded runs grow.

python -m scripts.bench_growth [--rounds N] [--seconds S] [--shape T|size|runs]   writes results/bench-growth.json
python -m scripts.bench_growth --peak JSON                       one case's peak memory on a CPU, in its own process
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from gpt2.errors import UserError, run_command
from scripts.bench import keep

OUT = Path("results/bench-growth.json")
PARTS = ("T", "size", "runs")
RECORDED_RUNS = 1000
DEFAULTS = {"cpu": (9, 0.5), "cuda": (3, 6.0)}  # turns of each case, seconds of a turn
ON_A_CPU = (
    "Times: under the heap that a study's training processes use, which keeps its buffers. Peaks: growth of the "
    "resident set over one\noptimizer step of another process, in which every large buffer has pages of its own (the "
    "kept heap's peak wobbles)."
)
ON_A_GPU = "Peaks: what the allocator gave out at most, in the process that was timed."


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench GROWTH=1")
    parser.add_argument("--rounds", type=int, help="turns of each case; default 9 on a CPU, 3 on a GPU")
    parser.add_argument(
        "--seconds", type=float, help="of timed steps a turn; default 0.5 on a CPU, 6 on a GPU"
    )
    parser.add_argument("--shape", default="", help="one part only: T, size or runs")
    parser.add_argument("--peak", default="")
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(**json.loads(arguments.peak))))
        return 0
    if arguments.shape not in ("", *PARTS):
        raise UserError(f"no part is called {arguments.shape!r}; there are {', '.join(PARTS)}")
    from gpt2 import target
    from gpt2.config import ANY_TARGET
    from study import growth
    from study.bench import INTERVAL

    resolved = target.resolve(ANY_TARGET)
    on_cpu = resolved.device == "cpu"
    usual = DEFAULTS["cpu" if on_cpu else "cuda"]
    rounds = usual[0] if arguments.rounds is None else arguments.rounds
    seconds = usual[1] if arguments.seconds is None else arguments.seconds
    note = ON_A_CPU if on_cpu else ON_A_GPU
    print(f"{resolved.device_name}, {resolved.dtype}")
    found: dict[str, Any] = {}
    for series in growth.SERIES["cpu" if on_cpu else "cuda"]:
        if arguments.shape in ("", series.along):
            found[series.along] = one_series(series, rounds, seconds, on_cpu)
    if set(found) - {"runs"}:
        print(f"Ratios are of cost, within a round: median [{INTERVAL}]. {note}", flush=True)
    if arguments.shape in ("", "runs"):
        from scripts import bench_records

        found["runs"] = bench_records.in_a_process(RECORDED_RUNS)
        print(bench_records.text(found["runs"]), flush=True)
    keep(OUT, resolved, {"memory": note, **found})
    return 0


def one_series(series: Any, rounds: int, seconds: float, on_cpu: bool) -> dict[str, Any]:
    """Measure, print and return a series; a peak of its own on a CPU only."""
    from gpt2.loss import CHUNK_ROWS
    from study import bench, growth

    samples = growth.run(
        series,
        rounds,
        seconds,
        lambda line: print(line, flush=True),
        bench.turns(on_cpu),
        growth.peak_in_a_process if on_cpu else None,
    )
    rows = growth.table(series, samples)
    rows_at_once = CHUNK_ROWS["cpu" if on_cpu else "cuda"]
    micro = series.shapes[0].cases[0][1]
    fits = growth.lines(rows, -(-rows_at_once // micro)) if series.along == "T" else {}
    print(growth.text(series, rows, fits), flush=True)
    listed = {name: [dataclasses.asdict(sample) for sample in own] for name, own in samples.items()}
    return {"fixed": series.fixed, "rows": rows, "lines": fits, "samples": listed}


def peak(shape: dict[str, Any], case: str, micro: int) -> dict[str, int]:
    """Peak bytes of one optimizer step on a CPU: growth of the resident set beyond the libraries, weights included.

    The evaluation is left out: its batch has the same tokens at every T.
    """
    import torch

    from gpt2 import target
    from gpt2.config import OptimizerConfig
    from gpt2.memory import PeakMeter
    from gpt2.work import Work
    from scripts.bench_case import model_and_attention

    torch.set_num_threads(target.cpu_threads(0))
    optimizer = OptimizerConfig(1e-4, 0.1, 0.0, 1.0, 0.9, 0.95, 1e-8, 1.0)

    def step(layers: int, heads: int, width: int, block_size: int) -> PeakMeter:
        sizes = {"name": "bench", "layers": layers, "heads": heads, "width": width, "block_size": block_size}
        model, attention = model_and_attention(sizes, case)
        work = Work(model, optimizer, attention, micro, 1, "cpu", "float32")
        meter = PeakMeter("cpu")
        stepper = work.prepare("cpu")  # its optimizer has its state, so that the step is one like any other
        stepper.step(torch.zeros((micro, block_size + 1), dtype=torch.int64), 1, 2, meter)
        return meter

    step(1, 1, 8, 2)  # what torch loads and sets up at the first use is not the step's
    measured = step(shape["layers"], shape["heads"], shape["width"], shape["block_size"])
    return {"peak_bytes": max(measured.by_phase.values(), default=measured.peaks()["allocated"])}


if __name__ == "__main__":
    run_command(main)
