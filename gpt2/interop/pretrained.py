"""Read GPT-2 from a folder that transformers wrote: config.json and model.safetensors. Import needs no torch.

config.json is checked field by field: a model that computes another function than ours is refused by name and value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.data import tokenizer
from gpt2.interop.files import NORM_EPSILON, tokenizer_files
from runtime.errors import UserError, first_sentences
from runtime.files import DamagedFileError, read_json
from runtime.settings import TOKENIZERS, ModelConfig, Vocabulary

if TYPE_CHECKING:
    from gpt2.model.transformer import GPT2

WEIGHTS = "model.safetensors"
# field of config.json -> accepted values, the first one where the field is absent
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # one function
    "layer_norm_epsilon": (NORM_EPSILON,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "auto_map": (None,),  # Python code next to the weights
    "quantization_config": (None,),
}
KNOWN = {vocabulary.size: vocabulary for vocabulary in TOKENIZERS.values()}
SIZES = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")


class PretrainedError(UserError, ValueError):
    """This project's model cannot hold the weights of a folder."""


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder has a model of transformers, and no run of this project."""
    return (folder / "config.json").is_file() and not (folder / "run.json").exists()


def read_shape(folder: Path) -> tuple[ModelConfig, Vocabulary]:
    """Return the shape and the tokenizer of a folder. PretrainedError for a model that is not computed here."""
    path = folder / "config.json"
    config = _json(path)
    for name in SIZES:
        if type(config.get(name)) is not int or config[name] < 1:
            raise PretrainedError(
                f"{path}: {name} is {config.get(name)!r}, no number of 1 or more; fix: another model"
            )
    layers, heads, width, positions, size = (config[name] for name in SIZES)
    if width % heads:
        raise PretrainedError(
            f"{path}: n_embd {width} is not a multiple of n_head {heads}; fix: another model"
        )
    if size not in KNOWN:
        sizes = " or ".join(f"{known} ({vocabulary.name})" for known, vocabulary in KNOWN.items())
        raise PretrainedError(f"{path}: vocab_size is {size}; fix: a model with vocab_size {sizes}")
    accepted = COMPUTED | {"n_inner": (None, 4 * width), "eos_token_id": (size - 1, None)}
    for name, values in accepted.items():
        given = config.get(name, values[0])
        if not any(given == value and type(given) is type(value) for value in values):
            needed = " or ".join(map(json.dumps, values))
            raise PretrainedError(f"{path}: {name} is {json.dumps(given)}; fix: a model with {name} {needed}")
    vocabulary = KNOWN[size]
    _check_tokens(folder / "tokenizer.json", vocabulary)
    shape = ModelConfig("custom", layers, heads, width, positions, 0.0, size, vocabulary.padded)
    return shape, vocabulary


def load_pretrained(folder: Path, shape: ModelConfig) -> GPT2:
    """Return the model of a folder in float32. PretrainedError for files that are missing, damaged or of another shape.

    shape: that of `read_shape`.
    """
    from gpt2.interop.weights import WeightsError, from_transformers
    from gpt2.train.step import build_model

    try:
        from safetensors.torch import load_file
    except ImportError:
        raise PretrainedError(
            "safetensors is not installed; fix: make setup-exchange, or pip install safetensors"
        ) from None
    path = folder / WEIGHTS
    if not path.is_file():
        raise PretrainedError(f"{folder} has no {WEIGHTS}; fix: copy the weights to the folder")
    model = build_model(shape)
    expected = model.state_dict()
    expected["token.weight"][shape.vocabulary :] = 0.0
    try:
        state = load_file(path)
    except Exception as error:  # a damaged file can fail in any way
        raise PretrainedError(
            f"{path} cannot be read: {first_sentences(error)}; fix: copy the file again"
        ) from None
    try:
        model.load_state_dict(from_transformers(state, expected))
    except WeightsError as error:
        raise PretrainedError(f"{path}: {error}; fix: the weights of its config.json") from error
    return model.eval()


def _check_tokens(path: Path, vocabulary: Vocabulary) -> None:
    """PretrainedError for a tokenizer.json with other tokens. A folder without one has the tokenizer of its size."""
    if not path.exists():
        return
    ours = tokenizer_files(tokenizer.load(vocabulary.name), 1)["tokenizer.json"]["model"]["vocab"]
    theirs = _json(path).get("model", {}).get("vocab", {})
    if {name for name, _ in ours.items() ^ theirs.items()} - {tokenizer.END_OF_TEXT}:
        raise PretrainedError(
            f"{path} has other tokens than {vocabulary.name}; fix: a model with GPT-2's tokenizer"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except DamagedFileError as error:
        raise PretrainedError(f"{error}; fix: copy the file again") from None
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} has no JSON object; fix: copy the file again")
    return content
