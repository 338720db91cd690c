"""The modules that a search over fixes starts with."""

from __future__ import annotations

from torch import nn


def units(model: nn.Module) -> list[str]:
    """Return the paths of the modules within each layer, and of those outside of layers.

    Layers are the members of a ModuleList, ModuleDict or Sequential of the model.
    """
    found: list[str] = []
    for name, child in model.named_children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            found.append(name)
            continue
        for number, layer in child.named_children():
            inner = [part for part, _ in layer.named_children()]
            found += [f"{name}.{number}.{part}" for part in inner] or [f"{name}.{number}"]
    return found
