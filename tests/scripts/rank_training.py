"""Very small runs of several ranks in the current folder: python -m tests.scripts.rank_training JSON.

JSON: [{"world", "arm", "run", "fault"}]. The configuration is in the run's folder (faulty_runs.configured). The ranks
are forked from one process that has loaded torch. fault: "lost" leaves rank 1 out of the sums of gradients.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer loads it

from gpt2 import gradients
from ra import arms
from runtime import ranks
from runtime.ranks import free_port
from tests.scripts.faulty_runs import train_configured


def main() -> int:
    """Train the runs of the argument; return 1 if a rank failed."""
    folder, patch = Path.cwd(), pytest.MonkeyPatch()
    patch.setattr(arms, "CUSTOM_FOLDER", folder / "custom")
    patch.setattr("ra.custom.__path__", [str(folder / "custom")])
    return max(fork(spec) for spec in json.loads(sys.argv[1]))


def fork(spec: dict[str, Any]) -> int:
    port, children = free_port(), []
    for rank in range(spec["world"]):
        child = os.fork()
        if not child:
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": spec["world"],
                "LOCAL_WORLD_SIZE": spec["world"],
            }
            os.environ |= {name: str(value) for name, value in numbers.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            status = 1
            try:
                train_as_rank(spec)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def train_as_rank(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ranks.join("cpu", 60)
    if spec.get("fault") == "lost":
        lose_rank()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train_configured(spec["arm"], Path(spec["run"]))
    ranks.leave()


def lose_rank() -> None:
    """Sum gradients without those of rank 1, as a wrong library would."""
    plain = gradients.sum_over_ranks

    def wrong(parameters: Any, total: torch.Tensor) -> None:
        if ranks.rank() == 1:
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)
        plain(parameters, total)

    gradients.sum_over_ranks = wrong


if __name__ == "__main__":
    sys.exit(main())
