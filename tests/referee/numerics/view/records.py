"""Write records of blocks with linear layers, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = "</script><img src=x onerror=window.taken=1>"


def tensor(size: float, **more: Any) -> dict[str, Any]:
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [4, 8],
        "Max": size,
        "Min": -size,
        "Mean": 0.01,
        "Norm": 2 * size,
        "requires_grad": True,
        **more,
    }


def write_record(folder: Path, blocks: int = 3, name: str = "h", kind: str = "Block") -> None:
    data: dict[str, Any] = {}
    parents: dict[str, str | None] = {}
    for block in range(blocks):
        outer = f"Module.{name}.{block}.{kind}.forward.0"
        row = {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(1.0)]}
        data[outer], parents[outer] = row, None
        for part in range(3):
            inner = f"Module.{name}.{block}.part{part}.Linear.forward.0"
            state = {"parameters": {"weight": tensor(0.5)}, "settings": {"bias": False}}
            data[inner] = {**row, **state, "output": [tensor(1.0)]}
            parents[inner] = outer
    write(folder / "step0/rank0", data, parents)


def write(folder: Path, data: dict[str, Any], parents: dict[str, str | None]) -> None:
    folder.mkdir(parents=True)
    head = {"task": "statistics", "level": "L0", "framework": "pytorch", "notes": []}
    (folder / "dump.json").write_text(json.dumps({**head, "data": data}))
    (folder / "construct.json").write_text(json.dumps(parents))
    (folder / "stack.json").write_text(json.dumps({"0": [list(data), ["File train.py, line 3, in forward"]]}))
