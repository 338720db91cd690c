"""Load exported folders with transformers and compare them with the run. Imports nothing of this project.

python -P loading_check.py REFERENCE FOLDER [REFERENCE FOLDER ...]

REFERENCE: a safetensors file with ids (B, T), the run's logits (B, T, V) and its loss of predicting ids[:, 1:]. Prints
one line of JSON for each folder: the largest difference of each check, relative to the largest logit or to the loss.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

PROJECT = ("gpt2", "ra", "study", "aqn")
NEW_TOKENS = 8
Difference = Callable[[Tensor, Tensor], float]


def main() -> None:
    """Check each folder of the command line."""
    arguments = sys.argv[1:]
    for reference, folder in zip(arguments[::2], arguments[1::2], strict=True):
        found = differences(folder, load_file(reference))
        print(json.dumps({"folder": folder, "project": importable(), "differences": found}), flush=True)


def importable() -> list[str]:
    """Return the packages of this project that this process could import."""
    return [name for name in PROJECT if importlib.util.find_spec(name)]


def differences(folder: str, reference: dict[str, Tensor]) -> dict[str, float]:
    """Return check -> largest relative difference."""
    ids, ours = reference["ids"], reference["logits"]
    largest = float(ours.abs().max())
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    def relative(one: Tensor, other: Tensor) -> float:
        return float((one - other).abs().max()) / largest

    loss = model(ids, labels=ids).loss
    loss.backward()
    dead = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    found = {"loss": abs(loss.item() - float(reference["loss"])) / float(reference["loss"])}
    found["parameters without gradient"] = float(len(dead))
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        found["logits"] = relative(model(ids).logits, ours)
        found["without use_cache"] = relative(model(ids, use_cache=False).logits, ours)
        found["padded"] = padded(model, ids, relative, ours)
        if model.config.use_cache:
            found["cache"] = cached(model, ids, relative, ours)
        found["generate"] = generated(model, ids[:, : max(1, ids.shape[1] - NEW_TOKENS)]) / largest
        with tempfile.TemporaryDirectory() as copy:
            model.save_pretrained(copy)
            again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)
            found["saved and loaded"] = relative(again(ids).logits, ours)
    return found


def padded(model: Any, ids: Tensor, relative: Difference, ours: Tensor) -> float:
    """Give the second sequence padding at its start, then at its end."""
    half = ids.shape[1] // 2
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[1, : ids.shape[1] - half] = 0
    right[1, half:] = 0
    moved = ids.clone()
    moved[1, ids.shape[1] - half :] = ids[1, :half]
    first = model(moved, attention_mask=left).logits
    second = model(ids, attention_mask=right).logits
    whole = max(relative(first[0], ours[0]), relative(second[0], ours[0]))
    return max(
        whole,
        relative(first[1, ids.shape[1] - half :], ours[1, :half]),
        relative(second[1, :half], ours[1, :half]),
    )


def cached(model: Any, ids: Tensor, relative: Difference, ours: Tensor) -> float:
    """Compute the sequence in three parts with a cache."""
    cache = DynamicCache(config=model.config)
    parts = ids.tensor_split([ids.shape[1] // 3, ids.shape[1] - 1], dim=1)
    logits = [model(part, past_key_values=cache, use_cache=True).logits for part in parts if part.numel()]
    return relative(torch.cat(logits, dim=1), ours)


def generated(model: Any, prompt: Tensor) -> float:
    """Return by how much a generated token's logit is below the largest one of a pass over the whole sequence."""
    end = min(prompt.shape[1] + NEW_TOKENS, model.config.max_position_embeddings)
    sequence = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_length=end, min_length=end
    )
    logits = model(sequence, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logits[..., model.config.eos_token_id] = -torch.inf  # min_length excludes it
    chosen = logits.gather(2, sequence[:, prompt.shape[1] :, None])[..., 0]
    return float((logits.amax(-1) - chosen).max())


if __name__ == "__main__":
    main()
