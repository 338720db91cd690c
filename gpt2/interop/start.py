"""Start a model from imported GPT-2 weights, whatever its variant (CONFIG_INIT_FROM).

The parameters shared with GPT-2 get the weights. Then every module with `start_at_identity` sets its other parameters
so that the model computes what GPT-2 does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.artifacts.run_record import StartedFrom
from gpt2.interop.pretrained import Pretrained, PretrainedError, find_pretrained
from gpt2.interop.weights import WeightsError, from_transformers
from gpt2.model.init import standard_shapes
from gpt2.model.transformer import GPT2


class StartError(PretrainedError):
    """A model cannot start from the weights."""


def started_from(source: str) -> StartedFrom:
    """Return the entry of the record for weights that are on this machine."""
    return StartedFrom(source, find_pretrained(source).sha256)


def load_start(model: GPT2, wanted: StartedFrom) -> None:
    """Find the weights and start the model from them. PretrainedError where the files have changed."""
    found = find_pretrained(wanted.source)
    refuse_changed(found, wanted.sha256)
    rows, width = model.token.weight.shape
    start_from(model, standard_weights(found, len(model.blocks), width, model.block_size, rows))


def refuse_changed(found: Pretrained, sha256: str) -> None:
    """PretrainedError where the files are not those of the SHA-256."""
    if found.sha256 != sha256:
        raise PretrainedError(
            f"the weights of {found.source} have changed: SHA-256 {found.sha256[:12]}..., and the study began with "
            f"{sha256[:12]}...; fix: restore the files, or set another CONFIG_STUDY_NAME"
        )


def standard_weights(
    found: Pretrained, layers: int, width: int, block_size: int, rows: int
) -> dict[str, Tensor]:
    """Read the weights in the names of this project, float32. rows: of the padded vocabulary; padded ones are 0."""
    shapes = standard_shapes(layers, width, block_size, rows)
    try:
        return from_transformers(found.state(), {name: torch.zeros(shape) for name, shape in shapes.items()})
    except WeightsError as error:
        raise PretrainedError(f"{found.source}: {error}; fix: the weights of its config.json") from error


@torch.no_grad()
def start_from(model: GPT2, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights into the parameters of the same name, then let each module start at the identity.

    A second call gives the same model. StartError names a weight that has no place.
    """
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        place = parameters.get(name)
        if place is None or place.shape != value.shape:
            has = (
                f"has shape {tuple(place.shape)}, not {tuple(value.shape)}"
                if place is not None
                else "is missing"
            )
            raise StartError(f"{name} of GPT-2 {has}")
        place.copy_(value)
    for module in model.modules():
        start = getattr(module, "start_at_identity", None)
        if start is not None:
            start()
