"""The workload of memory prediction and measurement: one steady-state optimizer step, then one evaluation batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt2.eval.validation import evaluating, evaluation_tokens
from gpt2.model.transformer import ModelParts
from gpt2.train.step import Phases, Stepper
from runtime.run_plan import BatchPlan
from runtime.settings import ModelConfig, OptimizerConfig

MICRO_BATCHES = 2  # per step: the second adds to existing gradients, and further ones repeat it


@dataclass(frozen=True)
class StepWorkload:
    """micro: sequences per micro-batch. kind: "cuda", "rocm", "npu" or "cpu": the device to predict for.

    accumulation: micro-batches per step. At most MICRO_BATCHES are run; more change no peak. compile: whether training
    compiles the model.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    parts: ModelParts | None
    micro: int
    accumulation: int
    kind: str
    dtype: str
    compile: bool = False

    @property
    def batch(self) -> BatchPlan:
        """Return the batch of the step that is run."""
        accumulation = min(self.accumulation, MICRO_BATCHES)
        return BatchPlan(self.micro * accumulation, self.micro, accumulation, 1, self.model.block_size)

    @property
    def evaluation_batch(self) -> int:
        """Return the number of windows of an evaluation batch."""
        return max(1, evaluation_tokens(self.kind) // self.model.block_size)

    def prepare(self, device: str, compile: bool = False) -> Stepper:
        """Build model and optimizer, and run a first step, which allocates the optimizer's state.

        The step has one token. With `compile`, it is compiled and has the tokens of the work.
        """
        stepper = Stepper(
            self.model,
            self.optimizer,
            self.batch,
            seed=0,
            device=device,
            dtype=self.dtype,
            compile=compile,
            parts=self.parts,
        )
        rows, tokens = (self.batch.effective, self.model.block_size) if compile else (1, 1)
        stepper.step(_ids(rows, tokens, device), 0, 2)
        return stepper

    def run(self, stepper: Stepper, phases: Phases) -> None:
        """Run the step (phases forward, backward, optimizer) and the evaluation."""
        T = self.model.block_size
        stepper.step(_ids(self.batch.effective, T, stepper.device), 1, 2, phases)
        ids = _ids(self.evaluation_batch, T, stepper.device)
        with evaluating(stepper.model), phases.phase("evaluation"), stepper.autocast():
            stepper.model.token_losses(ids[:, :-1], ids[:, 1:])


def _ids(rows: int, tokens: int, device: str) -> torch.Tensor:
    return torch.zeros((rows, tokens + 1), dtype=torch.int64, device=device)
