"""`make bench`: tokens/s, MFU and peak memory of each variant, and of a step written the usual way, side by side.

python -m scripts.bench [--rounds N] [--seconds S] [--shape NAME] [--cases "B plain RALEARN@32"]
    prints the table and writes results/bench.json, after every round: "complete" is false in it until the end
python -m scripts.bench --case JSON        one case in a process of its own: a line of seconds in, a line of JSON out
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case_step import BLOCK, serve
from gpt2.hardware.resolve import ResolvedTarget, export_environment
from gpt2.system import files
from gpt2.system.errors import UserError, run_command

if TYPE_CHECKING:
    from bench.runner import Sample, Shape, Stage

OUT = Path("results/bench.json")


def tell(line: str) -> None:
    print(line, flush=True)


def at_least(least: int, rounds: int, why: str = "") -> None:
    """UserError where so few rounds are none."""
    if rounds < least:
        raise UserError(f"--rounds {rounds}; right: at least {least}{why}")


def keep(
    out: Path, resolved: ResolvedTarget, found: dict[str, Any], schema: int = 1, complete: bool = True
) -> None:
    """Write what a bench of the family found, with when, where and under what; say so where it is all."""
    from gpt2.artifacts.provenance import record as environment

    out.parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    card = {"device": resolved.device_name, "dtype": resolved.dtype, "target": resolved.target.name}
    head = {"schema": schema, "created": stamp, "complete": complete, **card}
    files.write_json(out, {**head, "environment": environment(), **found})
    if complete:
        tell(f"written: {out}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--rounds", type=int, help="turns of each case; default 6 on a CPU, 3 on a GPU")
    parser.add_argument(
        "--seconds",
        type=float,
        help="of timed steps a turn in a new process; default 12 on a CPU, 6 on a GPU",
    )
    parser.add_argument("--shape", default="", help="only the shapes whose name contains this")
    parser.add_argument("--cases", default="", help="only these, such as: B plain RALEARN, or B@32")
    parser.add_argument("--case", default="")
    arguments = parser.parse_args()
    export_environment()
    if arguments.case:
        serve(**json.loads(arguments.case))
        return 0
    from bench import runner as bench
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve
    from study.memory.micro_batch import free_bytes

    resolved = resolve.resolve(ANY_TARGET)
    kind = resolved.device_type
    usual = bench.DEFAULTS[kind]
    rounds = usual[0] if arguments.rounds is None else arguments.rounds
    seconds = usual[1] if arguments.seconds is None else arguments.seconds
    at_least(1, rounds)
    shapes = bench.chosen(kind, arguments.shape, arguments.cases.split())
    peak = resolved.target.peak_flops
    tell(
        f"{resolved.device_name}, {resolved.dtype}; peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown'}"
    )
    found: dict[str, Any] = {"shapes": {}}
    for shape in shapes:
        found["shapes"][shape.name] = []
        for stage in bench.stages(shape, kind == "cpu", rounds, seconds, free_bytes("cpu")):
            found["shapes"][shape.name].append({})
            rows = measure(stage, found["shapes"][shape.name], resolved, found)
            tell(f"{bench.text(stage.shape, rows)}\n{stage.name}, {stage.rounds} rounds")
    if not any(stage.get("rows") for stages in found["shapes"].values() for stage in stages):
        raise UserError("nothing could be measured; why each case was left out stands above")
    tell(note(shapes, kind))
    keep(OUT, resolved, found, schema=2)
    return 0


def measure(
    stage: Stage, stages: list[dict[str, Any]], resolved: ResolvedTarget, found: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a stage. After every round what is known is put in the last of `stages`, and `found` written."""
    from bench import runner as bench

    def after(samples: list[Sample], left_out: list[str]) -> None:
        stages[-1] = {
            "stage": stage.name,
            "sequences_a_step": stage.shape.effective or None,
            "rows": bench.table(stage.shape, samples, resolved.target.peak_flops),
            "samples": [dataclasses.asdict(sample) for sample in samples],
            "left_out": left_out,
        }
        keep(OUT, resolved, found, schema=2, complete=False)

    with stage.turns() as in_turn:
        bench.run(stage.shape, stage.rounds, stage.seconds, tell, in_turn, after)
    rows: list[dict[str, Any]] = stages[-1]["rows"]
    return rows


def note(shapes: list[Shape], kind: str) -> str:
    """What the columns are."""
    from bench.runner import INTERVAL

    defaults = ", ".join(f"{shape.plain_micro} in {shape.name}" for shape in shapes)
    timed = {
        "cpu": "Every step is timed by itself.",
        "cuda": f"Steps are timed in blocks of {BLOCK}, with one synchronisation at the end of a block.",
    }
    return (
        "plain: GPT-2 as it is usually written (bench/reference_gpt.py), with the attention kernel that torch prefers. "
        f"batch: micro-batch x accumulation. {timed[kind]}\n"
        f"Ratios of tokens/s within a round: median [{INTERVAL}]. to plain: to the plain step at its default "
        f"micro-batch ({defaults}); at its micro: to the plain step at the case's own; to B: to B at the case's own.\n"
        "MFU = tokens/s x FLOPs a token / the card's peak; FLOPs: 6 a matrix weight, causal attention at half "
        "(in brackets nanoGPT's formula: 6 N + 12 L C T). Peak memory: of the timed steps, compiling left out."
    )


if __name__ == "__main__":
    run_command(main)
