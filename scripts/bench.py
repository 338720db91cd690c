"""`make bench`: tokens/s, MFU and peak memory of each variant, and of a step written the usual way, side by side.

python -m scripts.bench [--rounds N] [--seconds S] [--shape NAME]   writes results/bench.json and prints the table
python -m scripts.bench --case JSON        one case in a process of its own: a line of seconds in, a line of JSON out
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from gpt2.errors import UserError, run_command
from gpt2.target import ResolvedTarget, export_environment

OUT = Path("results/bench.json")
WARM_UP = 3


def tell(line: str) -> None:
    print(line, flush=True)


def keep(out: Path, resolved: ResolvedTarget, found: dict[str, Any], schema: int = 1) -> None:
    """Write what a bench of the family found, with when, where and under what, and say so."""
    from gpt2 import record
    from gpt2.environment import record as environment

    out.parent.mkdir(exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    card = {"device": resolved.device_name, "dtype": resolved.dtype, "target": resolved.target.name}
    record.write_json(
        out, {"schema": schema, "created": stamp, **card, "environment": environment(), **found}
    )
    print(f"written: {out}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=12.0, help="of timed steps a turn in a new process")
    parser.add_argument("--shape", default="", help="only the shapes whose name contains this")
    parser.add_argument("--case", default="")
    arguments = parser.parse_args()
    export_environment()
    if arguments.case:
        serve(**json.loads(arguments.case))
        return 0
    from gpt2 import target
    from gpt2.config import ANY_TARGET
    from study import bench
    from study.memory import free_bytes

    resolved = target.resolve(ANY_TARGET)
    kind = "cpu" if resolved.device == "cpu" else "cuda"
    shapes = [shape for shape in bench.SHAPES[kind] if arguments.shape in shape.name]
    if not shapes:
        names = ", ".join(shape.name for shape in bench.SHAPES[kind])
        raise UserError(f"no shape is called {arguments.shape!r} here; there are {names}")
    peak = resolved.target.peak_flops
    print(
        f"{resolved.device_name}, {resolved.dtype}; peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}"
    )
    found: dict[str, Any] = {}
    for shape in shapes:
        found[shape.name] = []
        for stage in bench.stages(
            shape, kind == "cpu", arguments.rounds, arguments.seconds, free_bytes("cpu")
        ):
            with stage.turns() as measure:
                samples = bench.run(stage.shape, stage.rounds, stage.seconds, tell, measure)
            rows = bench.table(stage.shape, samples, peak)
            listed = [dataclasses.asdict(sample) for sample in samples]
            found[shape.name].append({"stage": stage.name, "rows": rows, "samples": listed})
            print(f"{bench.text(stage.shape, rows)}\n{stage.name}, {stage.rounds} rounds", flush=True)
    print(
        "plain: GPT-2 as it is usually written (study/plain.py). Ratios of tokens/s within a round: median "
        f"[{bench.INTERVAL}].\n"
        "MFU = tokens/s x FLOPs a token / the card's peak; FLOPs: 6 a matrix weight, causal attention at half "
        "(in brackets nanoGPT's formula: 6 N + 12 L C T)."
    )
    keep(OUT, resolved, {"shapes": found}, schema=2)
    return 0


def serve(shape: dict[str, Any], case: str, micro: int) -> None:
    """Warm up, then for each line of seconds that comes in time steps for so long and answer with what was seen."""
    import torch

    from gpt2 import target
    from gpt2.config import ANY_TARGET, VOCABULARY
    from gpt2.memory import PeakMeter
    from study.bench import PLAIN

    resolved = target.make_ready(ANY_TARGET, model_of(shape))
    on_gpu = resolved.device != "cpu"
    meter = PeakMeter(resolved.device)
    make = plain_step if case == PLAIN else our_step
    step, flops, nanogpt = make(shape, case, micro, resolved)
    shape_BT = (micro, shape["block_size"] + 1)
    ids_BT = torch.randint(VOCABULARY, shape_BT, generator=torch.Generator().manual_seed(0)).to(
        resolved.device
    )
    with target.attention_context(resolved, 0.0):
        for iteration in range(WARM_UP):
            step(ids_BT, iteration)
        for line in sys.stdin:
            samples: list[float] = []
            began = time.perf_counter()
            while not samples or time.perf_counter() - began < float(line):
                mean = 0.0
                for iteration, share in enumerate(shares(case)):
                    before = time.perf_counter()
                    step(ids_BT, iteration)
                    if on_gpu:
                        torch.cuda.synchronize()
                    mean += share * (time.perf_counter() - before)
                samples.append(mean)
            middle = median(samples)
            answer = {
                "step_seconds": middle,
                "tokens_per_second": micro * shape["block_size"] / middle,
                "peak_bytes": meter.peaks()["allocated"],
                "flops_per_token": flops,
                "nanogpt_flops_per_token": nanogpt,
            }
            print(json.dumps(answer), flush=True)


def shares(case: str) -> tuple[float, ...]:
    """Of all steps, the shares that cost what the first, the second ... of `case` do: every k-th may cost more."""
    _, every = mix_of(case)
    return (1.0,) if every == 1 else (1 / every, 1 - 1 / every)


def plain_step(shape: dict[str, Any], case: str, micro: int, resolved: Any) -> tuple[Any, float, float]:
    from gpt2.config import PADDED_VOCABULARY
    from study.plain import PlainShape, PlainStep

    sizes: dict[str, int] = {name: shape[name] for name in ("layers", "heads", "width", "block_size")}
    step = PlainStep(PlainShape(**sizes, vocabulary=PADDED_VOCABULARY), resolved.device)
    flops = our_model(shape, "B").flops_per_token()
    return lambda ids, iteration: step(ids), flops, nanogpt_flops(step.model, shape)


def our_step(shape: dict[str, Any], case: str, micro: int, resolved: Any) -> tuple[Any, float, float]:
    from gpt2.batch import plan_batch
    from gpt2.config import OptimizerConfig
    from gpt2.step import Stepper

    model, attention = model_and_attention(shape, case)
    optimizer = OptimizerConfig(1e-4, 0.1, 0.0, 1.0, 0.9, 0.95, 1e-8, 1.0)
    stepper = Stepper(
        model,
        optimizer,
        plan_batch(micro, micro, 1, shape["block_size"]),
        seed=0,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=resolved.device != "cpu",
        attention=attention,
    )
    return (
        lambda ids, iteration: stepper.step(ids, iteration, 10**9),
        stepper.model.flops_per_token(),
        nanogpt_flops(stepper.model, shape),
    )


def model_of(shape: dict[str, Any]) -> Any:
    from gpt2.config import ModelConfig

    return ModelConfig(
        shape["name"], shape["layers"], shape["heads"], shape["width"], shape["block_size"], 0.0
    )


def model_and_attention(shape: dict[str, Any], case: str) -> tuple[Any, Any]:
    """case: a variant, or RALEARN:mix, or RALEARN:hard:k with the gate's gradient at every k-th step."""
    from ra.settings import AlternationSettings
    from ra.variants import variant

    mix, every = mix_of(case)
    model = model_of(shape)
    settings = AlternationSettings(mix or "output", 0.5, 1.0, gate_every=every)
    return model, variant(case.partition(":")[0], model, settings).attention


def mix_of(case: str) -> tuple[str, int]:
    """RALEARN:mix:k -> mix ("" for the default) and k (1)."""
    _, mix, every = [*case.split(":"), "", ""][:3]
    return mix, int(every or 1)


def our_model(shape: dict[str, Any], case: str) -> Any:
    from gpt2.step import build_model

    return build_model(*model_and_attention(shape, case))


def nanogpt_flops(model: Any, shape: dict[str, Any]) -> float:
    """FLOPs a token as nanoGPT counts them: 6 N + 12 L C T, N without the position embedding."""
    parameters = sum(p.numel() for p in model.parameters()) - shape["block_size"] * shape["width"]
    return float(6 * parameters + 12 * shape["layers"] * shape["width"] * shape["block_size"])


if __name__ == "__main__":
    run_command(main)
