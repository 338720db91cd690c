"""`make bench GROWTH=1`: what training costs as the text, the model and the number of recorded runs grow.

python -m scripts.bench_growth [--rounds N] [--seconds S] [--shape T|size|runs]   writes results/bench-growth.json
    round by round (on a CPU shape by shape); "complete" is false in it until the end
python -m scripts.bench_growth --peak JSON                       one case's peak memory on a CPU, in its own process
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.system.errors import UserError, run_command
from scripts.bench import keep, tell

if TYPE_CHECKING:
    from bench.suites.growth import Sample, Series

OUT = Path("results/bench-growth.json")
PARTS = ("T", "size", "runs")
RECORDED_RUNS = 1000
DEFAULTS = {"cpu": (9, 0.5), "cuda": (3, 6.0)}  # turns of each case, seconds of a turn
ON_A_CPU = (
    "Times: under the heap that a study's training processes use, which keeps its buffers. Peaks: growth of the "
    "resident set over one\noptimizer step of another process, in which every large buffer has pages of its own (the "
    "kept heap's peak wobbles)."
)
ON_A_GPU = "Peaks: what the allocator gave out at most during the timed steps, in their own process."


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
    from bench.runner import INTERVAL
    from bench.suites import growth
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve

    resolved = resolve.resolve(ANY_TARGET)
    on_cpu = resolved.device == "cpu"
    usual = DEFAULTS[resolved.device_type]
    rounds = usual[0] if arguments.rounds is None else arguments.rounds
    seconds = usual[1] if arguments.seconds is None else arguments.seconds
    note = ON_A_CPU if on_cpu else ON_A_GPU
    tell(f"{resolved.device_name}, {resolved.dtype}")
    found: dict[str, Any] = {"memory": note}

    def partly(along: str, part: dict[str, Any]) -> None:
        found[along] = part
        keep(OUT, resolved, found, complete=False)

    measured = [s for s in growth.SERIES[resolved.device_type] if arguments.shape in ("", s.along)]
    for series in measured:
        one_series(series, rounds, seconds, on_cpu, partial(partly, series.along))
    if measured and not any(found[series.along]["rows"] for series in measured):
        raise UserError("nothing could be timed; why each case was left out stands above")
    if measured:
        tell(f"Ratios are of cost, within a round: median [{INTERVAL}]. {note}")
    if arguments.shape in ("", "runs"):
        from scripts import bench_records

        found["runs"] = bench_records.in_a_process(RECORDED_RUNS)
        tell(bench_records.text(found["runs"]))
    keep(OUT, resolved, found)
    return 0


def one_series(
    series: Series, rounds: int, seconds: float, on_cpu: bool, partly: Callable[[dict[str, Any]], None]
) -> None:
    """Measure and print a series; a peak of its own on a CPU only. partly: called with what is known so far."""
    from bench import runner as bench
    from bench.suites import growth

    samples = growth.run(
        series,
        rounds,
        seconds,
        tell,
        bench.turns(on_cpu),
        growth.peak_in_a_process if on_cpu else None,
        lambda samples: partly(numbers(series, samples, on_cpu)),
    )
    whole = numbers(series, samples, on_cpu)
    tell(growth.text(series, whole["rows"], whole["lines"]))


def numbers(series: Series, samples: dict[str, list[Sample]], on_cpu: bool) -> dict[str, Any]:
    """What is written of a series."""
    from bench.suites import growth
    from gpt2.model.loss import CHUNK_ROWS

    rows = growth.table(series, samples)
    rows_at_once = CHUNK_ROWS["cpu" if on_cpu else "cuda"]
    micro = series.shapes[0].cases[0][1]
    fits = growth.lines(rows, -(-rows_at_once // micro)) if series.along == "T" else {}
    listed = {name: [dataclasses.asdict(sample) for sample in own] for name, own in samples.items()}
    return {"fixed": series.fixed, "rows": rows, "lines": fits, "samples": listed}


def peak(shape: dict[str, Any], case: str, micro: int) -> dict[str, int]:
    """Peak bytes of one optimizer step on a CPU: growth of the resident set beyond the libraries, weights included.

    The evaluation is left out: its batch has the same tokens at every T.
    """
    import torch

    from bench.case_step import model_and_attention, optimizer
    from gpt2.hardware.cpu import cpu_threads
    from gpt2.memory.workload import StepWorkload
    from gpt2.train.peak_memory import PeakMeter

    torch.set_num_threads(cpu_threads(0))

    def step(layers: int, heads: int, width: int, block_size: int) -> PeakMeter:
        sizes = {"name": "bench", "layers": layers, "heads": heads, "width": width, "block_size": block_size}
        model, attention = model_and_attention(sizes, case)
        work = StepWorkload(model, optimizer(), attention, micro, 1, "cpu", "float32")
        meter = PeakMeter("cpu")
        stepper = work.prepare("cpu")  # its optimizer has its state, so that the step is one like any other
        stepper.step(torch.zeros((micro, block_size + 1), dtype=torch.int64), 1, 2, meter)
        return meter

    step(1, 1, 8, 2)  # what torch loads and sets up at the first use is not the step's
    measured = step(shape["layers"], shape["heads"], shape["width"], shape["block_size"])
    return {"peak_bytes": max(measured.by_phase.values(), default=measured.peaks()["allocated"])}


if __name__ == "__main__":
    run_command(main)
