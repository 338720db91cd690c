"""Find GPT-2 weights in the form of transformers: a folder, or a name on the Hugging Face hub. Import needs no torch.

config.json is checked field by field: a model that computes another function than ours is refused by name and value.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.artifacts import seal
from gpt2.config.config import MODELS, ModelConfig
from gpt2.config.vocabulary import BYTES, GPT2, TOKENIZERS, Vocabulary
from gpt2.data import tokenizer
from gpt2.interop.files import NORM_EPSILON, tokenizer_files
from gpt2.system.errors import UserError, first_sentences
from gpt2.system.read_files import DamagedFileError, read_json, read_text

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["config.json", *WHOLE, *(name + INDEX for name in WHOLE), "tokenizer.json", "merges.txt"]
HUB_SECONDS = 10  # to answer
# field of config.json -> accepted values, the first one where the field is absent
COMPUTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # one function
    "layer_norm_epsilon": (NORM_EPSILON,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "auto_map": (None,),  # Python code beside the weights
    "quantization_config": (None,),
}
KNOWN = {one.size: one for one in TOKENIZERS.values()}
SIZES = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")


class PretrainedError(UserError, ValueError):
    """There are no weights of that name, or this project's model cannot hold them."""


@dataclass(frozen=True)
class Pretrained:
    """GPT-2 weights on this disk. source: as typed. files: of the weights. notes: for the user."""

    source: str
    folder: Path
    layers: int
    heads: int
    width: int
    positions: int
    vocabulary: Vocabulary
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the file of weights; of several, that of the list of their names and digests."""
        sums = [(path.name, seal.digest(path)) for path in self.files]
        if len(sums) == 1:
            return sums[0][1]
        return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in sums).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The last part of the source as the name of a folder."""
        local = Path(self.source).expanduser()
        last = (local.resolve() if local == self.folder else local).name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:64] or "model"

    @property
    def config_lines(self) -> list[str]:
        """The lines of .config that give this shape and tokenizer."""
        shape = (self.layers, self.heads, self.width)
        size = [f"CONFIG_{symbol}=y" for symbol, (_, *known) in MODELS.items() if (*known,) == shape]
        tokens = next(symbol for symbol, known in TOKENIZERS.items() if known == self.vocabulary)
        custom = [
            "CONFIG_GPT2_MODEL_CUSTOM=y", f"CONFIG_GPT2_LAYERS={self.layers}",
            f"CONFIG_GPT2_HEADS={self.heads}", f"CONFIG_GPT2_WIDTH={self.width}",
        ]  # fmt: skip
        return [*(size or custom), f"CONFIG_GPT2_BLOCK_SIZE={self.positions}", f"CONFIG_{tokens}=y"]

    def check(self, model: ModelConfig) -> None:
        """PretrainedError where a configured model cannot hold the weights. It may have fewer positions."""
        wanted = (model.layers, model.heads, model.width, model.vocabulary)
        if wanted == (self.layers, self.heads, self.width, self.vocabulary.size) and (
            model.block_size <= self.positions
        ):
            return
        raise PretrainedError(
            f'CONFIG_INIT_FROM="{self.source}" has {self.layers} layers, {self.heads} heads, width {self.width}, '
            f"{self.positions} positions and {self.vocabulary.size} tokens; .config has {model.layers}, {model.heads}, "
            f"{model.width}, {model.block_size} and {model.vocabulary}; fix: {' '.join(self.config_lines)} (a smaller "
            "CONFIG_GPT2_BLOCK_SIZE fits, too)"
        )

    def state(self) -> dict[str, Tensor]:
        """Read the weights, in the names of transformers. PretrainedError for a damaged file and for NaN."""
        found: dict[str, Tensor] = {}
        for path in self.files:
            found |= _tensors(path)
        for name, value in found.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise PretrainedError(
                    f"{self.source}: {name} has values that are not finite; fix: other weights"
                )
        return found


def find_pretrained(source: str) -> Pretrained:
    """Find weights by a folder or by a name of the hub. PretrainedError names the fault and its fix."""
    folder = Path(source).expanduser()
    if not (folder / "config.json").exists():  # `gpt2` is a folder of this project, too
        folder = _from_hub(source)
    config = _json(folder, "config.json")
    _check_config(source, config)
    vocabulary, notes = _vocabulary(source, folder, config["vocab_size"])
    layers, heads, width, positions = (config[name] for name in SIZES[:4])
    files = _weight_files(folder)
    return Pretrained(source, folder, layers, heads, width, positions, vocabulary, files, notes)


def _from_hub(source: str) -> Path:
    """Return the local copy of a model of the hub: the cached one, else a download."""
    folder = "a folder with config.json and model.safetensors"
    local = Path(source).expanduser()
    problem = f"{source} is not a folder on this machine"
    if local.exists():
        problem = f"the folder {source} has no config.json" if local.is_dir() else f"{source} is not a folder"
    if not HUB_NAME.fullmatch(source) or local.is_file():
        raise PretrainedError(f"{problem}; fix: {folder}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PretrainedError(
            f"{problem}, and names of the Hugging Face hub need huggingface_hub; fix: pip install huggingface_hub, or "
            f"{folder}"
        ) from None
    options = {"allow_patterns": HUB_FILES, "etag_timeout": HUB_SECONDS}
    with contextlib.suppress(Exception):  # not in the cache
        return Path(snapshot_download(source, local_files_only=True, **options))
    try:
        return Path(snapshot_download(source, **options))
    except Exception as error:  # of any library below
        raise PretrainedError(
            f"{problem} and did not come from the Hugging Face hub ({first_sentences(error)}); fix: {folder}, copied "
            "from a machine with a network"
        ) from None


def _check_config(source: str, config: Any) -> None:
    """PretrainedError for the first field of config.json that our model does not compute."""
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise PretrainedError(f"{source}/config.json: model_type is {kind!r}; fix: a model of type gpt2")
    for name in SIZES:
        if type(config.get(name)) is not int or config[name] < 1:
            raise PretrainedError(
                f"{source}/config.json: {name} is {config.get(name)!r}, no number of 1 or more; fix: another model"
            )
    width, last = config["n_embd"], config["vocab_size"] - 1
    if width % config["n_head"]:
        raise PretrainedError(
            f"{source}/config.json: n_embd {width} is not a multiple of n_head {config['n_head']}; fix: another model"
        )
    accepted = COMPUTED | {"n_inner": (None, 4 * width)}
    if last + 1 in KNOWN:
        accepted["eos_token_id"] = (None, last)
    for name, values in accepted.items():
        found = config.get(name, values[0])
        if not any(found == value and type(found) is type(value) for value in values):
            raise PretrainedError(
                f"{source}/config.json: {name} is {json.dumps(found)}, and "
                + _needed(name, config["vocab_size"], [value for value in values if value is not None])
            )


def _needed(name: str, size: int, values: list[Any]) -> str:
    """Return the values of a field that this project computes, and the fix."""
    if name == "eos_token_id":
        pairs = " or ".join(f"{one.size - 1} with vocab_size {one.size}" for one in KNOWN.values())
        return (
            f"vocab_size is {size}; this project needs eos_token_id {pairs}, the last id of the vocabulary; fix: a "
            f"model with these ids, or eos_token_id {size - 1} in config.json if that is its end of text"
        )
    if not values:
        return f"this project computes no model with {name}; fix: a model without it"
    needed = " or ".join(map(json.dumps, values))
    return f"this project computes {needed}; fix: a model with {name} {needed}"


def _vocabulary(source: str, folder: Path, size: int) -> tuple[Vocabulary, tuple[str, ...]]:
    """Return the tokenizer of the folder, which must be one of this project's, and notes."""
    known = KNOWN.get(size)
    wrong = f"{source} has another tokenizer than GPT-2's"
    fix = "fix: a model with GPT-2's tokenizer, or one that `make export` wrote"
    if known is None:
        raise PretrainedError(
            f"{wrong}: vocab_size is {size}, not {GPT2.size} (or {BYTES.size}, bytes); {fix}"
        )
    ours = tokenizer_files(tokenizer.load(known.name), 1)["tokenizer.json"]["model"]
    if (folder / "tokenizer.json").exists():
        theirs = _json(folder, "tokenizer.json")
        model = theirs.get("model", {}) if isinstance(theirs, dict) else {}
        merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", [])]
        extra = set(model.get("vocab", {}).items()) ^ set(ours["vocab"].items())
        if merges != ours["merges"] or {name for name, _ in extra} - {tokenizer.END_OF_TEXT}:
            raise PretrainedError(f"{wrong}: {folder / 'tokenizer.json'} has other tokens; {fix}")
        return known, ()
    if (folder / "merges.txt").exists() and known == GPT2:
        lines = [line for line in read_text(folder / "merges.txt").splitlines() if line[:9] != "#version:"]
        if [line for line in lines if line] != ours["merges"]:
            raise PretrainedError(f"{wrong}: {folder / 'merges.txt'} has other merges; {fix}")
        return known, ()
    if known == BYTES:
        raise PretrainedError(f"{wrong}: vocab_size is {size}, and there is no tokenizer.json; {fix}")
    return known, (f"the folder has no tokenizer; GPT-2's is taken, because vocab_size is {size:,}",)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of weights: model.safetensors, its shards, or those of pytorch_model.bin."""
    for name in WHOLE:
        if (folder / name).is_file():
            return (folder / name,)
        if (folder / (name + INDEX)).is_file():
            index = _json(folder, name + INDEX)
            listed = index.get("weight_map") if isinstance(index, dict) else None
            names = sorted(set(listed.values())) if isinstance(listed, dict) else []
            if not names or not all(isinstance(one, str) and Path(one).name == one for one in names):
                raise PretrainedError(f"{folder / (name + INDEX)} lists no files; fix: copy the model again")
            missing = [one for one in names if not (folder / one).is_file()]
            if missing:
                raise PretrainedError(f"{folder / missing[0]} is missing; fix: copy all files of the model")
            return tuple(folder / one for one in names)
    raise PretrainedError(f"{folder} has no {' or '.join(WHOLE)}; fix: copy the weights beside config.json")


def _tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of weights. Nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise PretrainedError(
                    "safetensors is not installed; fix: make import, or pip install safetensors"
                ) from None
            return load_file(path)
        import torch

        found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or not all(
            isinstance(value, torch.Tensor) for value in found.values()
        ):
            raise PretrainedError(f"{path} has other content than tensors; fix: copy the file again")
        return found
    except UserError:
        raise
    except pickle.UnpicklingError:  # its text advises to run the file
        raise PretrainedError(
            f"{path} is damaged or holds other objects than tensors, which are not loaded; fix: copy the file "
            "again, or convert it to model.safetensors"
        ) from None
    except Exception as error:  # a damaged file can fail in any way
        raise PretrainedError(
            f"{path} cannot be read: {first_sentences(error)}; fix: copy the file again"
        ) from None


def _json(folder: Path, name: str) -> Any:
    try:
        return read_json(folder / name)
    except FileNotFoundError:
        raise PretrainedError(f"{folder} has no {name}; fix: a folder that transformers loads") from None
    except DamagedFileError as error:
        raise PretrainedError(f"{error}; fix: copy the file again") from None
