"""Export a trained run as a folder.

B and the fixed reciprocal patterns are GPT-2: a reciprocal layer is a standard one with W_Q and W_K exchanged
(ra.control), so transformers loads them as GPT2LMHeadModel. Other arms are written for `ra.exported.load_run`. Noise
on norms (AQN) is of training only.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpt2 import tokenizer
from gpt2.transformers_config import model_config, tokenizer_files
from gpt2.transformers_files import to_transformers
from ra.arms import parse_arm, reciprocal_layers
from ra.control import swap_query_and_key
from ra.exported import CONFIG, CUSTOM, WEIGHTS
from runtime import files
from runtime.errors import UserError
from study.evaluation.loaded_runs import TrainedRun, load_run


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    facts: tuple[str, ...]  # about the weights
    plain: bool  # whether transformers loads the folder


def export_run(run_dir: Path, out: Path | None = None) -> Exported:
    """Write the newest weights of a run to `out`, by default results/<study>/export/<run>.

    UserError for a folder that exists or cannot be written, and without safetensors.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise UserError(
            "safetensors is not installed; fix: make export, or pip install safetensors"
        ) from None
    run = load_run(run_dir)
    folder = out or run_dir.parent.parent / "export" / run.name
    if folder.exists():
        raise UserError(f"{folder} exists; fix: remove it, or OUT=another folder")
    layers = _gpt2_layers(run)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
            part = Path(place) / folder.name
            part.mkdir()
            facts = _write_arm(part, run, run_dir) if layers is None else _write_gpt2(part, run, layers)
            part.rename(folder)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written: {error.strerror}; fix: OUT=another folder"
        ) from error
    noise = ["trained with noise on the norms, which is not exported"] if parse_arm(run.variant).noise else []
    first = f"{run.name}: the weights of iteration {run.iteration:,} in float32"
    return Exported(folder, (first, *run.notes, *noise, *facts), layers is not None)


def _gpt2_layers(run: TrainedRun) -> frozenset[int] | None:
    """Return the reciprocal layers of a run that is GPT-2 with W_Q and W_K renamed; None for other arms."""
    arm = parse_arm(run.variant)
    return None if arm.parts else reciprocal_layers(arm.attention, run.config.model.layers)


def _write_gpt2(folder: Path, run: TrainedRun, reciprocal: frozenset[int]) -> list[str]:
    """Write the files of GPT2LMHeadModel, with W_Q and W_K of the reciprocal layers exchanged."""
    from safetensors.torch import save_file

    swap_query_and_key(run.model, reciprocal)
    shape = run.config.model
    save_file(
        to_transformers(run.model.state_dict(), shape.vocabulary), folder / WEIGHTS, metadata={"format": "pt"}
    )
    encoding = tokenizer.load(run.config.data.tokenizer)
    contents = tokenizer_files(encoding, shape.block_size)
    contents["config.json"] = model_config(shape, encoding.eot)
    for name, content in contents.items():
        files.write_text(folder / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    _readable_as(folder / WEIGHTS, folder / "config.json")
    shown = ", ".join(map(str, sorted(reciprocal)))
    return [f"W_Q and W_K are exchanged in the reciprocal layers ({shown})"] if reciprocal else []


def _write_arm(folder: Path, run: TrainedRun, run_dir: Path) -> list[str]:
    """Write the files of `ra.exported.load_run`."""
    from safetensors.torch import save_file

    state = {name: value.clone().contiguous() for name, value in run.model.state_dict().items()}
    facts = {"arm": run.variant, "seed": str(run.seed), "iteration": str(run.iteration)}
    save_file(state, folder / WEIGHTS, metadata=facts)
    shutil.copyfile(run_dir / "config", folder / CONFIG)
    custom = run_dir.resolve().parent.parent / "own"
    if custom.is_dir():
        shutil.copytree(custom, folder / CUSTOM)
    _readable_as(folder / WEIGHTS, folder / CONFIG)
    return [f"transformers has no class for {run.variant}"]


def _readable_as(path: Path, other: Path) -> None:
    """Give a file the permissions of another one: safetensors lets only its owner read."""
    path.chmod(other.stat().st_mode)
