"""Export a trained run as a folder that transformers loads.

B and the fixed reciprocal patterns are GPT-2: a reciprocal layer is a standard one with W_Q and W_K exchanged
(ra.control), so that the exported weights compute the same function. Noise on norms (AQN) is of training only.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt2.artifacts import run_record
from gpt2.config.config import ModelConfig
from gpt2.data import tokenizer
from gpt2.interop.files import model_config, tokenizer_files
from gpt2.interop.weights import to_transformers
from gpt2.model.transformer import GPT2
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.train.step import build_model
from ra.arms import parse_arm
from ra.control import swap_query_and_key
from ra.names import reciprocal_layers
from study.attention.inspect import load_run
from study.export.model_card import model_card

TOLERANCE = 1e-4  # of the largest logit; float32 rounding of two orders of one sum is below 1e-5


class ExportError(UserError):
    """A run cannot be exported."""


@dataclass(frozen=True)
class Exported:
    """What was written. facts: about the weights. difference: largest of a logit, relative to the largest logit."""

    run: str
    folder: Path
    facts: tuple[str, ...]
    difference: float


def export_run(run_dir: Path, out: Path | None = None) -> Exported:
    """Write config.json, model.safetensors, the tokenizer's files and README.md to `out`.

    By default to results/<study>/export/<run>. ExportError for an arm that is no GPT-2, a folder that has other files,
    and without safetensors.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ExportError(
            "safetensors is not installed; fix: make export, or pip install safetensors"
        ) from None
    run = load_run(run_dir)
    folder = out or run_dir.parent.parent / "export" / run.name
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md")
    others = [path.name for path in sorted(folder.glob("*")) if path.name not in names]
    if others or (folder.exists() and not folder.is_dir()):
        raise ExportError(
            f"{folder} has other content ({(others or ['a file'])[0]}); fix: OUT=an empty folder"
        )
    arm, layers = parse_arm(run.variant), run.config.model.layers
    reciprocal = reciprocal_layers(arm.attention, layers) if not arm.parts else None
    if reciprocal is None:
        raise ExportError(
            f"{run.name}: {run.variant} is no GPT-2 of transformers; fix: RUN=a run of B or of a fixed pattern (RAALL, "
            "RA:5-7, ...) without NORM=, MLP= and POSITION="
        )
    facts = [
        f"the weights of iteration {run.iteration:,}, float32, {_shape(run.config.model)}",
        *run.notes,
    ]
    if reciprocal:
        shown = ", ".join(map(str, sorted(reciprocal)))
        facts.append(
            f"W_Q and W_K are exchanged in the reciprocal layers ({shown}): the function is the same"
        )
    if arm.noise:
        facts.append("trained with noise on the norms; these weights are used without noise")
    model = run.model.eval()
    standard = copy.deepcopy(model)
    swap_query_and_key(standard, reciprocal)
    state = to_transformers(standard.state_dict(), run.config.model.vocabulary)
    difference = _difference(model, standard, run.config.model)
    encoding = tokenizer.load(run.config.data.tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / names[1], metadata={"format": "pt"})
        contents = tokenizer_files(encoding, run.config.model.block_size)
        contents["config.json"] = model_config(run.config.model, encoding.eot)
        for name, content in contents.items():
            files.write_text(folder / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        card = model_card(run_dir, run_record.load(run_dir), facts, str(folder))
        files.write_text(folder / "README.md", card)
    except OSError as error:
        raise ExportError(
            f"{error.filename or folder} cannot be written: {error.strerror}; fix: OUT=another folder"
        ) from error
    return Exported(run.name, folder, tuple(facts), difference)


def _shape(config: ModelConfig) -> str:
    return (
        f"{config.layers} layers of width {config.width}, {config.heads} heads, {config.block_size} positions"
    )


@torch.no_grad()
def _difference(model: GPT2, standard: GPT2, config: ModelConfig) -> float:
    """Compare the logits of the run with those of a plain GPT-2. ExportError if they differ."""
    plain = build_model(dataclasses.replace(config, dropout=0.0)).eval()
    plain.load_state_dict(standard.state_dict())
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, config.vocabulary, (2, config.block_size), generator=generator)
    ours: Tensor = model(ids_BT)
    difference = float((ours - plain(ids_BT)).abs().max() / ours.abs().max())
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported weights compute something else: logits differ by {difference:.1e} of the largest; fix: "
            "report this with the run's config"
        )
    return difference
