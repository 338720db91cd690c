"""The sequences of a case's step, and what the plain step computes."""

import dataclasses
from typing import Any

import pytest
import torch

from bench import case_step, reference_gpt
from bench.cases import PLAIN, Shape
from bench.reference_gpt import PlainGPT, PlainStep
from gpt2.transformer import GPT2
from runtime import resolved_target
from runtime.settings import TargetConfig

SHAPE = Shape("small", 2, 2, 16, 8, ())
FORWARD = {PLAIN: (PlainGPT, "forward"), "B": (GPT2, "hidden")}


@pytest.mark.parametrize("case", [PLAIN, "B"])
@pytest.mark.parametrize(("effective", "micro", "times"), [(0, 4, 1), (12, 4, 3), (12, 6, 2)])
def test_every_case_has_equally_many_sequences_a_step_at_any_micro_batch(
    case: str, effective: int, micro: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of this process
    calls: list[int] = []
    owner, name = FORWARD[case]
    forward = getattr(owner, name)

    def counted(model: Any, ids_BT: torch.Tensor, *others: Any) -> Any:
        calls.append(len(ids_BT))
        return forward(model, ids_BT, *others)

    monkeypatch.setattr(owner, name, counted)
    resolved = resolved_target.resolve(TargetConfig("cpu", "float32", False, 0, "auto", False))
    shape = dataclasses.replace(SHAPE, effective=effective)
    step, _ = case_step.case_step(shape, case, micro, resolved)
    step(0)
    assert calls == [micro] * times


def test_the_plain_step_accumulates_as_nanogpt_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean gradient of the whole batch, clipped and applied once, for any split."""
    ids_ET = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(0))
    limits: list[float] = []
    monkeypatch.setattr(
        reference_gpt.nn.utils, "clip_grad_norm_", lambda parameters, limit: limits.append(limit)
    )

    def gradients(accumulation: int) -> list[torch.Tensor]:
        step = PlainStep(SHAPE, 50, "cpu", accumulation)
        applied: list[list[torch.Tensor]] = []

        def apply() -> None:
            applied.append([p.grad.clone() for p in step.model.parameters() if p.grad is not None])

        monkeypatch.setattr(step.optimizer, "step", apply)
        step(ids_ET)
        assert all(p.grad is None for p in step.model.parameters())
        (found,) = applied
        return found

    whole = gradients(1)
    for accumulation in (2, 4, 8):
        torch.testing.assert_close(gradients(accumulation), whole, rtol=1e-4, atol=1e-6)
    assert limits == [1.0] * 4
