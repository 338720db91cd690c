"""Read GPT-2 from a folder that transformers wrote: config.json and model.safetensors. Import needs no torch.

config.json is checked field by field: a model that computes another function than ours is refused by name and value.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2 import dataset, hellaswag, tokenizer
from gpt2.evaluator import Evaluator, evaluate_sets
from gpt2.hellaswag import load_items
from gpt2.training_step import autocast
from gpt2.transformers_config import NORM_EPSILON, tokenizer_files
from gpt2.validation import perplexity_of
from runtime import attention_kernels
from runtime.errors import UserError, first_sentences
from runtime.files import DamagedFileError, read_json
from runtime.settings import VOCABULARIES, Config, ModelConfig, Vocabulary
from runtime.signals import Stop

LAYER_NAMES = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # buffers of older checkpoints
PREFIX = "transformer."


class WeightsError(ValueError):
    """The weights are not those of a GPT-2 of this size."""


def to_transformers(state: Mapping[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """Return the state of GPT2LMHeadModel without its tied head. vocabulary: rows that are kept, without padding.

    WeightsError names a parameter that a standard GPT-2 does not have.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        other = _their_name(name)
        if other is None:
            raise WeightsError(f"{name} is not a parameter of GPT-2")
        if other == "wte.weight":
            value = value[:vocabulary]
        transposed = value.T if _is_conv1d(other) else value
        found[PREFIX + other] = transposed.contiguous()
    return found


def from_transformers(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for a model of this project. expected: its state, whose padded rows and shapes are used.

    Reads the states of GPT2LMHeadModel and of GPT2Model. WeightsError names what is missing, unknown or of another
    shape.
    """
    given = {name.removeprefix(PREFIX): value for name, value in state.items()}
    given = {name: value for name, value in given.items() if not CAUSAL_MASKS.fullmatch(name)}
    head = given.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in given and not torch.equal(head, given["wte.weight"]):
        raise WeightsError("lm_head.weight is not tied to wte.weight")
    found: dict[str, Tensor] = {}
    for name, place in expected.items():
        other = _their_name(name)
        if other is None or other not in given:
            raise WeightsError(f"{other or name} is missing")
        value = given.pop(other)
        value = value.T if _is_conv1d(other) else value
        if other == "wte.weight" and value.shape[0] < place.shape[0]:
            value = torch.cat([value, place[value.shape[0] :].to(value.dtype)])
        if value.shape != place.shape:
            raise WeightsError(f"{other} has shape {tuple(value.shape)}, not {tuple(place.shape)}")
        found[name] = value.to(place.dtype).contiguous()
    if given:
        raise WeightsError(f"{next(iter(given))} is unknown")
    return found


def _their_name(name: str) -> str | None:
    """Return the name without `transformer.`; None for a parameter that GPT-2 does not have."""
    plain = {
        "token.weight": "wte.weight",
        "position.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return plain.get(name)
    layer, module, kind = match.groups()
    return f"h.{layer}.{LAYER_NAMES[module]}.{kind}" if module in LAYER_NAMES else None


def _is_conv1d(name: str) -> bool:
    return name.endswith(".weight") and any(f".{module}." in name for module in CONV1D)


if TYPE_CHECKING:
    from gpt2.transformer import GPT2

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
KNOWN = {vocabulary.size: vocabulary for vocabulary in VOCABULARIES.values()}
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

    from gpt2.training_step import build_model

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


def evaluate_pretrained(folder: Path, config: Config) -> list[str]:
    """Return lines on the validation perplexity, the texts of CONFIG_EVAL_SETS and HellaSwag, in float32.

    config: gives data, evaluation and device. Shape, block size and tokenizer are those of the folder.
    """
    shape, vocabulary = read_shape(folder)
    config = replace(
        config,
        model=shape,
        data=replace(config.data, tokenizer=vocabulary.name),
        target=replace(config.target, dtype="float32"),
    )
    resolved = attention_kernels.prepare_device(config.target, shape)
    model = load_pretrained(folder, shape).to(resolved.device)
    corpus = dataset.open_corpus(dataset.prepare(config.data, report=print))
    evaluator = Evaluator(
        model,
        resolved.device,
        functools.partial(autocast, resolved.device, resolved.dtype),
        dataset.validation_windows(corpus.validation, shape.block_size, config.evaluation.tokens),
        tokenizer.load(vocabulary.name),
        config.evaluation,
        Stop(),
        print,
    )
    loss = evaluator.validate(0, 0.0)["loss"]
    if not math.isfinite(loss):
        raise PretrainedError(f"{folder}: the validation loss is {loss}; fix: copy the weights again")
    lines = [
        f"{folder}: {shape.layers} layers, {shape.heads} heads, width {shape.width}, {shape.block_size} positions, "
        f"{vocabulary.size:,} tokens, on {resolved.device_name} in float32",
        f"validation loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, on {evaluator.tokens:,} tokens",
    ]
    for text, nats in evaluate_sets(config, evaluator, print, lines.append):
        by_token, by_word = (
            perplexity_of(math.fsum(nats) / count) or math.nan for count in (text.tokens, text.words)
        )
        lines.append(f"{text.name}: perplexity {by_token:.2f} by token, {by_word:.2f} by word")
    return [*lines, _hellaswag(evaluator, config)]


def _hellaswag(evaluator: Evaluator, config: Config) -> str:
    if not config.evaluation.hellaswag:
        return "HellaSwag is not scored: CONFIG_HELLASWAG is off"
    source = hellaswag.obtain(config.evaluation, config.data.directory, report=print)
    if isinstance(source, str):
        return f"HellaSwag is not scored: {source}"
    score = evaluator.score_items(load_items(source, config.evaluation.hellaswag_limit))
    return f"HellaSwag: acc {100 * score.acc:.1f} %, acc_norm {100 * score.acc_norm:.1f} %, {score.items:,} items"
