"""Export a trained run as a folder that transformers loads.

B and the fixed reciprocal patterns are GPT-2: a reciprocal layer is a standard one with W_Q and W_K exchanged
(ra.control), so that the exported weights compute the same function. Other arms are exported with the Python files of
their model (study.export.remote_code), which transformers runs with trust_remote_code=True. A custom variant is the one
that the study recorded. Noise on norms (AQN) is of training only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.artifacts import run_record
from gpt2.artifacts.run_record import RunRecord
from gpt2.config.config import ModelConfig
from gpt2.config.dotconfig import read_symbols
from gpt2.data import tokenizer
from gpt2.interop.files import model_config, tokenizer_files
from gpt2.interop.weights import to_transformers
from gpt2.model.transformer import GPT2, learned_scalars
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.train.step import build_model
from ra.arms import parse_arm
from ra.control import swap_query_and_key
from ra.hooks import custom_folder
from ra.names import reciprocal_layers
from ra.settings import AlternationSettings
from study.attention.inspect import TrainedRun, load_run
from study.export.check import ROOT, TOLERANCE, check_folder, has_cache
from study.export.model_card import model_card
from study.export.remote_code import HEADER, arm_config, arm_parts, python_files

NO_NOISE = "trained with noise on the norms; these weights are used without noise"
NAMES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "LICENSE",
)


@dataclass(frozen=True)
class Exported:
    """The result of an export. facts: about the weights. difference: largest of a logit, relative to the largest logit.

    remote_code: whether loading it needs trust_remote_code=True.
    """

    run: str
    folder: Path
    facts: tuple[str, ...]
    difference: float
    remote_code: bool = False


def export_run(run_dir: Path, out: Path | None = None) -> Exported:
    """Write config.json, model.safetensors, the tokenizer's files and README.md to `out`.

    By default to results/<study>/export/<run>. An arm that is not GPT-2 also gets the Python files of its model. Files
    of an earlier export are replaced. UserError for a folder that has other files, where the exported model computes
    something else, and without safetensors.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise UserError(
            "safetensors is not installed; fix: make export, or pip install safetensors"
        ) from None
    recorded = run_dir.resolve().parent.parent / "own"  # the variants of the study
    with custom_folder(recorded) if recorded.is_dir() else contextlib.nullcontext():
        run = load_run(run_dir)
        folder = out or run_dir.parent.parent / "export" / run.name
        _refuse_other_content(folder)
        alternation = AlternationSettings.from_symbols(read_symbols(run_dir / "config"))
        record, reciprocal = run_record.load(run_dir), _gpt2_layers(run)
        found = _arm_files(run, record, alternation) if reciprocal is None else _gpt2_files(run, reciprocal)
        contents = {
            name: json.dumps(content, ensure_ascii=False, indent=1) + "\n"
            for name, content in found.json_files.items()
        }
        facts = (
            f"the weights of iteration {run.iteration:,}, float32, {_shape(run.config.model)}",
            *run.notes,
            *found.facts,
        )
        contents |= found.texts
        contents["README.md"] = model_card(run_dir, record, facts, str(folder), found.arm_facts)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
                difference = _write(Path(place) / folder.name, run.model, found, contents)
                _publish(Path(place) / folder.name, folder)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder} cannot be written: {error.strerror}; fix: OUT=another folder"
            ) from error
    return Exported(run.name, folder, facts, difference, bool(found.arm_facts))


@dataclass(frozen=True)
class _Files:
    """The content of an export without the card. difference: as in Exported; None: to be found by loading it."""

    state: dict[str, Tensor]
    json_files: dict[str, Any]
    facts: tuple[str, ...]
    difference: float | None
    texts: dict[str, str] = field(default_factory=dict)
    arm_facts: tuple[str, ...] = ()


def _gpt2_layers(run: TrainedRun) -> frozenset[int] | None:
    """Return the reciprocal layers of a run that is GPT-2 with W_Q and W_K renamed; None for other arms."""
    arm = parse_arm(run.variant)
    return None if arm.parts else reciprocal_layers(arm.attention, run.config.model.layers)


def _gpt2_files(run: TrainedRun, reciprocal: frozenset[int]) -> _Files:
    """Return the files of GPT2LMHeadModel. UserError if its logits are not those of the run."""
    facts = []
    if reciprocal:
        shown = ", ".join(map(str, sorted(reciprocal)))
        facts.append(
            f"W_Q and W_K are exchanged in the reciprocal layers ({shown}): the function is the same"
        )
    if parse_arm(run.variant).noise:
        facts.append(NO_NOISE)
    model = run.model.eval()
    standard = copy.deepcopy(model)
    swap_query_and_key(standard, reciprocal)
    state = to_transformers(standard.state_dict(), run.config.model.vocabulary)
    difference = _difference(model, standard, run.config.model)
    encoding = tokenizer.load(run.config.data.tokenizer)
    json_files = tokenizer_files(encoding, run.config.model.block_size)
    json_files["config.json"] = model_config(run.config.model, encoding.eot)
    return _Files(state, json_files, tuple(facts), difference)


def _arm_files(run: TrainedRun, record: RunRecord, alternation: AlternationSettings) -> _Files:
    """Return the files of an arm with the Python files of its model."""
    arm, model, sizes = parse_arm(run.variant), run.model.eval(), run.config.model
    parts = arm_parts(arm, sizes, alternation)
    encoding = tokenizer.load(run.config.data.tokenizer)
    cached = has_cache(model)
    facts = [NO_NOISE] if arm.noise else []
    if not cached:
        facts.append("generation has no cache (use_cache is false): the attention needs the whole sequence")
    for name, values in learned_scalars(model).items():
        facts.append(f"{name}, by layer: {', '.join(f'{value:.3f}' for value in values)}")
    distinct = len(list(model.named_parameters()))
    if distinct != len(list(model.named_parameters(remove_duplicate=False))):
        facts.append("parameters that layers share are separate here: fine-tuning changes each of them alone")
    json_files = tokenizer_files(encoding, sizes.block_size)
    settings = arm_config(run.variant, sizes, alternation, parts, encoding.eot)
    trained = {"run": run.name, "seed": run.seed, "iteration": run.iteration, "commit": record.commit}
    json_files["config.json"] = settings | trained | {"use_cache": cached}
    texts = python_files(run.variant, parts) | {"LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8")}
    state = {f"model.{name}": value.clone().contiguous() for name, value in model.state_dict().items()}
    shown = tuple(f"{part} ({what.module}): {what.formula}" for part, what in sorted(parts.items()))
    return _Files(state, json_files, tuple(facts), None, texts, shown)


def _refuse_other_content(folder: Path) -> None:
    """UserError for a folder with files that no export wrote."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder} is not UTF-8 text; fix: OUT=another folder") from None
    others = [path.name for path in sorted(folder.glob("*")) if not _is_exported(path)]
    if others or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} has other content ({(others or ['a file'])[0]}); fix: OUT=an empty folder")


def _is_exported(path: Path) -> bool:
    if path.suffix == ".py" and path.is_file():
        return path.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
    return path.name in NAMES


def _write(folder: Path, model: GPT2, found: _Files, contents: Mapping[str, str]) -> float:
    """Write the files and return the difference. UserError where transformers computes something else."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(found.state, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in contents.items():
        files.write_text(folder / name, content)
    (folder / "model.safetensors").chmod(
        (folder / "README.md").stat().st_mode
    )  # safetensors lets only its owner read
    return check_folder(folder, model) if found.difference is None else found.difference


def _publish(source: Path, folder: Path) -> None:
    """Replace the files of an earlier export by those of `source`."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if not (source / old.name).exists():
            old.unlink()
    for path in sorted(source.iterdir()):
        path.replace(folder / path.name)


def _shape(config: ModelConfig) -> str:
    return (
        f"{config.layers} layers of width {config.width}, {config.heads} heads, {config.block_size} positions"
    )


@torch.no_grad()
def _difference(model: GPT2, standard: GPT2, config: ModelConfig) -> float:
    """Compare the logits of the run with those of a plain GPT-2. UserError if they differ."""
    plain = build_model(dataclasses.replace(config, dropout=0.0)).eval()
    plain.load_state_dict(standard.state_dict())
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, config.vocabulary, (2, config.block_size), generator=generator)
    ours: Tensor = model(ids_BT)
    difference = float((ours - plain(ids_BT)).abs().max() / ours.abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"the exported weights compute something else: logits differ by {difference:.1e} of the largest; fix: "
            "report this with the run's config"
        )
    return difference
