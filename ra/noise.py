"""Norms with noise on their weight during training: y = (gamma + Z) x_hat + beta, Z ~ N(0, sigma^2).

Z is drawn for each optimizer step and is the same for all its micro-batches. It is a constant for autograd, so the
gradient of gamma is that of a norm without noise. Evaluation has no noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.initial_weights import keyed_normal
from ra.noise_schedule import NoiseError, NoiseSchedule


class _Noise(nn.Module):
    """Noise on `weight`, which a subclass has. The buffer is in no checkpoint: a resumed run draws it from the step."""

    schedule: NoiseSchedule
    weight: nn.Parameter
    noise: Tensor

    def start_noise(self, schedule: NoiseSchedule) -> None:
        self.schedule = schedule
        self.register_buffer("noise", torch.zeros_like(self.weight), persistent=False)

    def noisy_weight(self) -> Tensor:
        """Return gamma + Z in training, gamma in evaluation."""
        return self.weight + self.noise if self.training else self.weight

    @torch.no_grad()
    def draw_noise(self, name: str, seed: int, iteration: int, iterations: int) -> None:
        """Set the noise of a step: a pure function of the arguments, drawn on the CPU in float64.

        name: of the module.
        """
        sigma = self.schedule.sigma(iteration, iterations)
        if sigma == 0.0:
            self.clear_noise()
        else:
            drawn = keyed_normal(seed, f"aqn.{iteration}.{name}", self.weight.shape)
            self.noise.copy_(drawn.mul_(sigma), non_blocking=True)

    def clear_noise(self) -> None:
        """Remove the noise, so that training mode computes what evaluation does."""
        self.noise.zero_()


class NoisyLayerNorm(_Noise, nn.LayerNorm):
    """LayerNorm with noise on its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.noisy_weight(), self.bias, self.eps)


class NoisyRMSNorm(_Noise, nn.RMSNorm):
    """RMSNorm with noise on its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.noisy_weight(), self.eps)


def add_noise(norm: nn.Module, schedule: NoiseSchedule) -> nn.Module:
    """Return the norm with noise in training. NoiseError for another norm than LayerNorm and RMSNorm."""
    noisy: NoisyLayerNorm | NoisyRMSNorm
    if type(norm) is nn.LayerNorm and norm.elementwise_affine:
        noisy = NoisyLayerNorm(norm.normalized_shape, norm.eps, bias=norm.bias is not None)
    elif type(norm) is nn.RMSNorm and norm.elementwise_affine:
        noisy = NoisyRMSNorm(norm.normalized_shape, norm.eps)
    else:
        raise NoiseError(
            f"{type(norm).__name__} is not a LayerNorm or RMSNorm with a weight, which AQN needs; fix: remove +AQN="
        )
    noisy.load_state_dict(norm.state_dict())
    noisy.start_noise(schedule)
    return noisy
