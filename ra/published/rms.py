"""RMSNorm in place of every LayerNorm: no mean is subtracted and no bias is added.

y = x / sqrt(mean(x^2) + eps) * g,  mean over the C channels, one gain g per channel, eps = 1e-5 as in GPT-2's norms

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467). It removes C biases per norm.
"""

from __future__ import annotations

from torch import nn

from ra.hooks import AttentionSpec


def norm(layer: int, spec: AttentionSpec) -> nn.RMSNorm:
    """Build a norm of a layer."""
    return nn.RMSNorm(spec.width, eps=1e-5)
