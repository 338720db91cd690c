"""A GPT-2 in the files of transformers with seeded random weights, without the seconds in which transformers loads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpt2.config.config import ModelConfig
from gpt2.config.vocabulary import BYTES, Vocabulary
from gpt2.data import tokenizer
from gpt2.interop.files import model_config, tokenizer_files
from gpt2.interop.weights import to_transformers
from gpt2.model.init import initialise
from gpt2.model.transformer import GPT2
from gpt2.train.step import build_model

SHAPE = ("custom", 2, 2, 16)  # layers, heads, width


def a_model(seed: int = 0, positions: int = 24, ids: Vocabulary = BYTES) -> GPT2:
    """Return a model whose attention is far from uniform."""
    model = build_model(ModelConfig(*SHAPE, positions, 0.0, ids.size, ids.padded))
    initialise(model, seed)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * seed + number)
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        model.token.weight[ids.size :] = 0.0
    return model.eval()


def write_model(
    folder: Path, model: GPT2 | None = None, ids: Vocabulary = BYTES, tokens: bool = True, **changes: Any
) -> Path:
    """Write config.json, model.safetensors and tokenizer.json. changes: fields of config.json; None removes one."""
    model = model or a_model(ids=ids)
    folder.mkdir(parents=True, exist_ok=True)
    shape = ModelConfig(*SHAPE, model.block_size, 0.0, ids.size, ids.padded)
    encoding = tokenizer.load(ids.name)
    config = model_config(shape, encoding.eot) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(to_transformers(model.state_dict(), ids.size), folder / "model.safetensors")
    if tokens:
        content = tokenizer_files(encoding, model.block_size)["tokenizer.json"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
