"""Load an exported folder in a process without this project, and compare its outputs with those of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt2.model.sampling import Cache, logits
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("loading_check.py")
TOLERANCE = 1e-4  # of the largest logit; float32 rounding of two orders of one sum is below 1e-5
LIMIT_SECONDS = 7200  # a model of 1.5 billion parameters on a busy CPU


def sample_ids(model: GPT2) -> Tensor:
    """Return token ids (2, T) on which outputs are compared. T: longer than a window of a quarter of the block size."""
    length = min(model.block_size, max(128, model.block_size // 4 + 64))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocabulary, (2, length), generator=generator)


@torch.no_grad()
def has_cache(model: GPT2) -> bool:
    """Return whether q, k and v of earlier tokens give the outputs of the whole sequence."""
    ids_BT, cache = sample_ids(model), Cache()
    ours = model(ids_BT)
    try:
        found = torch.cat([logits(model, part, cache) for part in ids_BT.split(ids_BT.shape[1] - 1, 1)], 1)
    except Exception:  # the attention may be anyone's code
        return False
    rows = [layer.rows for layer in cache.layers]
    return all(row and row[0].shape[:3] == row[1].shape[:3] for row in rows) and float(
        (found - ours).abs().max()
    ) <= TOLERANCE * float(ours.abs().max())


@torch.no_grad()
def write_reference(path: Path, model: GPT2) -> None:
    """Write token ids, and the logits and the loss of the run."""
    from safetensors.torch import save_file

    ids_BT = sample_ids(model)
    loss = model.token_losses(ids_BT[:, :-1], ids_BT[:, 1:]).double().mean()
    save_file({"ids": ids_BT, "logits": model(ids_BT), "loss": loss.float()}, path)


def check_folder(folder: Path, model: GPT2) -> float:
    """Return the largest relative difference of a logit. UserError where the folder computes something else."""
    with tempfile.TemporaryDirectory() as place:
        reference = Path(place) / "reference.safetensors"
        write_reference(reference, model)
        (line,) = run_script([str(reference), str(folder.resolve())], Path(place))
    found: dict[str, float] = json.loads(line)["differences"]
    wrong = {check: value for check, value in found.items() if not value <= TOLERANCE}
    if wrong:
        check, value = max(wrong.items(), key=lambda item: item[1])
        raise UserError(
            f"transformers computes something else with the exported folder: {check} {value:.1e}; fix: report this "
            "with the run's config and the variant's file"
        )
    return found["logits"]


def run_script(arguments: Sequence[str], place: Path) -> list[str]:
    """Run the check in the folder `place`; return its lines. UserError with the last line of a failure."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path and Path(path).resolve() != ROOT),
        "HF_MODULES_CACHE": str(place / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the exported folder did not answer within {LIMIT_SECONDS} s; fix: run the command on an idle machine"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "No module named 'transformers'" in last:
            raise UserError(
                "transformers is not installed; fix: make export, or pip install 'transformers>=5,<6'"
            )
        raise UserError(
            f"transformers cannot run the exported folder: {last}; fix: correct the variant's file"
        )
    return done.stdout.strip().splitlines()
