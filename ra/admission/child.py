"""The process that runs a variant's code: it reads a request from standard input and prints one JSON line per event.

User code may print, hang or crash; `ra.admission.process` starts this process and reads its output.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

import ra.custom
from gpt2.artifacts.typed_json import parse
from ra import names
from ra.admission.cost import costs
from ra.admission.examine import examine
from ra.admission.probe import Probe, examined_part, inputs, run
from ra.admission.process import Request

LOADING = "load"


def main() -> None:
    """Answer the request. Whatever user code prints goes to standard error."""
    request = parse(Request, json.load(sys.stdin), "request")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        names.CUSTOM_FOLDER = Path(request.custom_folder)
        ra.custom.__path__ = [request.custom_folder]
        for name in request.names:
            _answer(request, name, out)


def _answer(request: Request, name: str, out: TextIO) -> None:
    def tell(**event: Any) -> None:
        print(json.dumps({"variant": name} | event), file=out, flush=True)

    tell(check=LOADING)
    try:
        probe = Probe(name, request.model, request.alternation, request.autocast)
        built = digests(probe)
    except names.VariantError as error:
        tell(error=str(error))
        return
    if request.examine:
        examination = examine(probe, lambda check: tell(check=check))
        if request.count_costs:
            tell(check="cost")
            found = costs(name, request.model, request.alternation)
            examination = dataclasses.replace(examination, costs=found)
        tell(examination=examination.to_json(), digests=built)
    else:
        tell(digests=built)


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


if __name__ == "__main__":
    main()
