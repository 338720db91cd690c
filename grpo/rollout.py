"""TRL's GRPOTrainer with noise around sampling and log-probabilities of the rollout.

`GRPOTrainer._generate_single_turn` is the only place of TRL 1.16 that samples, so a subclass has the noise exactly
there. A callback cannot: TRL computes rewards, advantages and losses between the same two callbacks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from trl import GRPOTrainer

from gpt2.initial_weights import keyed_normal
from grpo.accuracy import write_responses
from grpo.gsm8k import reward
from ra.noise_schedule import NoiseError, NoiseSchedule
from referee.numerics.runs.logp_diff import logp_diff

# Noise on the norms of a Hugging Face model during the rollout: y = (gamma + Z) x_hat, Z ~ N(0, sigma^2).
#
# In the rollout a norm has another weight tensor, gamma + Z. The trained tensor is never written, so it is equal to the
# bit afterwards.


PROJECTED = (
    "input_layernorm",
    "post_attention_layernorm",
)  # in front of attention's and the MLP's projections
FINAL = "norm"  # in front of the head


def noisy_norms(model: nn.Module, schedule: NoiseSchedule) -> dict[str, Any]:
    """Return the norms that get noise by name. NoiseError for a model without them.

    They are the RMSNorms and LayerNorms in front of a projection, named as in Llama, Mistral and Qwen.
    """
    names = (*PROJECTED, FINAL) if schedule.final else PROJECTED
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names
        and type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
        and isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    if not found or (schedule.final and not any(name.rpartition(".")[2] == FINAL for name in found)):
        raise NoiseError(
            f"{type(model).__name__} has no norms named {', '.join(names)}, which noise needs; fix: another model, or "
            'CONFIG_VARIANTS="B"'
        )
    return found


def draw(name: str, shape: torch.Size, sigma: float, seed: int, step: int) -> Tensor:
    """Draw the noise of a norm at a step: float32 on the CPU, a pure function of the arguments."""
    return keyed_normal(seed, f"aqn.{step}.{name}", shape).mul_(sigma)


@contextlib.contextmanager
def rollout_noise(
    model: nn.Module, schedule: NoiseSchedule | None, seed: int, step: int, steps: int
) -> Iterator[float]:
    """Within the block, the model's norms have the noise of this step. Yields its standard deviation."""
    sigma = schedule.sigma(step, steps) if schedule else 0.0
    norms = noisy_norms(model, schedule) if schedule and sigma else {}
    trained = {name: norm.weight for name, norm in norms.items()}
    try:
        for name, norm in norms.items():
            noise = draw(name, norm.weight.shape, sigma, seed, step)
            noisy = norm.weight.detach() + noise.to(norm.weight.device, norm.weight.dtype)
            norm.weight = nn.Parameter(noisy, requires_grad=False)
        yield sigma
    finally:
        for name, norm in norms.items():
            norm.weight = trained[name]


class DivergedError(RuntimeError):
    """The run diverged. The message says why."""


def refuse_divergence(line: Mapping[str, Any]) -> None:
    """Raise DivergedError where the loss, the gradient norm or the reward of a step is not finite."""
    for name in ("loss", "grad_norm", "reward"):
        value = line[name]
        if value is not None and not math.isfinite(value):
            raise DivergedError(f"the {name} is {value}")


class TokenLogps(LogitsProcessor):  # type: ignore[misc]
    """Records the log-probability of each sampled token. The last token's follows from `finish`."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.columns: list[Tensor] = []
        self.next: Tensor | None = None  # (B, V), of the token that is sampled next

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._record(input_ids)
        largest = float(scores.amax())  # nan, if one is
        if not math.isfinite(largest):
            raise DivergedError(f"a logit of the rollout is {largest}")
        self.next = (scores.float() / self.temperature).log_softmax(-1)
        return scores

    def _record(self, ids: Tensor) -> None:
        if self.next is not None:
            self.columns.append(self.next.gather(1, ids[:, -1:]))

    def finish(self, sequences: Tensor) -> None:
        self._record(sequences)
        self.next = None

    def rows(self, lengths: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of each response."""
        table = torch.cat(self.columns, dim=1).tolist()
        return [row[:length] for row, length in zip(table, lengths, strict=True)]


def recorded_rewards(run_dir: Path) -> Callable[..., list[float]]:
    """Return the reward function of TRL, which records every response of a step."""

    def exact_match(
        completions: Sequence[Any],
        answer: Sequence[str],
        problem: Sequence[int],
        trainer_state: Any,
        **_: Any,
    ) -> list[float]:
        texts = [one[0]["content"] for one in completions]
        rewards = [reward(text, expected) for text, expected in zip(texts, answer, strict=True)]
        write_responses(run_dir, f"train-{trainer_state.global_step + 1:05}", problem, answer, texts, rewards)
        return rewards

    return exact_match


LOGGED = {  # in a line of metrics.jsonl -> of TRL
    "loss": "loss", "grad_norm": "grad_norm", "reward": "reward", "reward_std": "reward_std", "entropy": "entropy",
    "response_tokens": "completions/mean_length", "cut_share": "completions/clipped_ratio",
}  # fmt: skip


class RolloutNoiseTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO with noise in the rollout. on_step: called with the metrics of every step before its checkpoint."""

    def __init__(
        self,
        *arguments: Any,
        schedule: NoiseSchedule | None,
        noise_seed: int,
        on_step: Callable[[dict[str, Any]], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.schedule, self.noise_seed, self.on_step = schedule, noise_seed, on_step
        self.sigma = 0.0
        self._training_logps: Tensor | None = None
        self._differences: list[tuple[float, float]] = []  # mean and mean absolute, of each response

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        step, steps = self.state.global_step, self.state.max_steps
        with (
            _recording(model, self.temperature) as logps,
            rollout_noise(model, self.schedule, self.noise_seed, step, steps) as self.sigma,
        ):
            completions, _ = super()._generate_single_turn(prompt_ids, *arguments, **options)
        return completions, logps.rows([len(one) for one in completions])

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*arguments, **options)
        self._training_logps = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        found = logp_diff(inputs["sampling_per_token_logps"], self._training_logps, inputs["completion_mask"])
        self._differences += [(float(row.mean()), float(abs(row).mean())) for row in found.differences]
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            means = [sum(values) / len(values) for values in zip(*self._differences, strict=True)]
            self._differences.clear()
            difference, absolute = means or (math.nan, math.nan)
            noise = {"sigma": self.sigma, "logp_diff": difference, "logp_diff_absolute": absolute}
            self.on_step({name: logs.get(key) for name, key in LOGGED.items()} | noise)


@contextlib.contextmanager
def _recording(model: Any, temperature: float) -> Iterator[TokenLogps]:
    """Within the block, `model.generate` records log-probabilities."""
    logps, generate = TokenLogps(temperature), model.generate

    def recorded(**options: Any) -> Tensor:
        sequences: Tensor = generate(**options, logits_processor=LogitsProcessorList([logps]))
        logps.finish(sequences)
        return sequences

    model.generate = recorded
    try:
        yield logps
    finally:
        del model.generate
