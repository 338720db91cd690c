"""The process that runs a variant's code: it reads a request from standard input and prints one JSON line per event.

User code may print, hang or crash; `ra.admission.process` starts this process and reads its output.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

import ra.custom
from gpt2.predicted_memory import StepWorkload, predict
from gpt2.transformer import ModelParts
from ra import arms
from ra.admission.examine import examine
from ra.admission.probe import OPTIMIZER, Probe, examined_part, inputs, run
from ra.admission.process import Request
from ra.admission.results import (
    OUTSIDE,
    Cost,
    Costs,
)
from ra.arms import BASELINE, parse_arm
from ra.counts import count, matched_width
from ra.variants import Variant, variant
from runtime.records import parse
from runtime.settings import AlternationSettings, ModelConfig

LOADING = "load"


def main() -> None:
    """Answer the request. Whatever user code prints goes to standard error."""
    request = parse(Request, json.load(sys.stdin), "request")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        arms.CUSTOM_FOLDER = Path(request.custom_folder)
        ra.custom.__path__ = [request.custom_folder]
        for name in request.names:
            if not _answer(request, name, out):
                break  # `ra.admission.process` examines the others in a new process


def _answer(request: Request, name: str, out: TextIO) -> bool:
    """Examine a variant, or digest it. Returns whether this process may examine others: it is as before."""

    def tell(**event: Any) -> None:
        print(json.dumps({"variant": name} | event), file=out, flush=True)

    tell(check=LOADING)
    try:
        probe = Probe(name, request.model, request.alternation, request.autocast)
        built = digests(probe)
    except arms.VariantError as error:
        tell(error=str(error))
        return False
    if request.examine:
        examination = examine(probe, lambda check: tell(check=check))
        if request.count_costs:
            tell(check="cost")
            found = costs(name, request.model, request.alternation)
            examination = examination.replace(costs=found)
        tell(examination=examination.to_json(), digests=built)
        return all(one.check != OUTSIDE for one in examination.violations)
    tell(digests=built)
    return True


def digests(probe: Probe) -> dict[str, Any]:
    """SHA-256 of every parameter and buffer by name, and some output values of the first layer; {} if it fails."""
    found: dict[str, Any] = {}
    try:
        model = probe.build(probe.shape, tuple(probe.layers))
        for number, layer in enumerate(probe.layers):
            attention = examined_part(model, number)
            for name, value in [*attention.named_parameters(), *attention.named_buffers()]:
                content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[f"layer {layer}: {name}"] = hashlib.sha256(content).hexdigest()
            y_BTC = run(attention, inputs(1, min(9, probe.ordinary), probe.shape.width, torch.float32))
            found[f"layer {layer}: the output"] = y_BTC.flatten()[:: probe.shape.width // 4].tolist()
    except (Exception, SystemExit):  # the check "shape" reports it
        return {}
    return found


def costs(name: str, model: ModelConfig, alternation: AlternationSettings) -> Costs:
    """Measure the variant and the baseline at the study's shape, without allocating the model."""

    def parts(sizes: ModelConfig) -> ModelParts:
        return variant(parse_arm(name).parts_name, sizes, alternation).parts

    ours, base = (_cost(variant(each, model, alternation)) for each in (name, BASELINE))
    return Costs(
        ours,
        base,
        width_equal_parameters=matched_width(model, parts, "match", base.parameters),
        width_equal_flops=matched_width(model, parts, "flops", base.flops_per_token),
    )


def _cost(chosen: Variant) -> Cost:
    found = count(chosen.model, chosen.parts)
    try:
        work = StepWorkload(chosen.model, OPTIMIZER, chosen.parts, 1, 1, "cpu", "float32", False)
        memory = predict(work).peak_bytes
    except (Exception, SystemExit):  # the user's code may not run on tensors without memory
        memory = None
    return Cost(found.parameters, found.flops, found.calls, memory)


if __name__ == "__main__":
    main()
