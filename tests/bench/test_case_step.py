"""Timing of a case, and the sequences of its step."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import case_step, reference_gpt
from bench.case_step import timed_step
from bench.cases import PLAIN, Shape
from bench.reference_gpt import PlainGPT, PlainStep
from gpt2.transformer import GPT2
from runtime import resolve
from runtime.settings import TargetConfig

SHAPE = Shape("small", 2, 2, 16, 8, ())
FORWARD = {PLAIN: (PlainGPT, "forward"), "B": (GPT2, "hidden")}


@given(every=st.integers(2, 20))
def test_on_a_cpu_each_kind_of_step_is_timed_once_and_weighted_by_its_share(every: int) -> None:
    now = [0.0]

    def step(iteration: int) -> None:
        now[0] += 18 if iteration % every == 0 else 10

    def seconds(case: str) -> float:
        return timed_step(step, case, lambda: None, False, lambda: now[0])

    assert seconds("B") == seconds("RALEARN:hard") == pytest.approx(18.0)
    assert seconds(f"RALEARN:hard:{every}") == pytest.approx(18 / every + 10 * (every - 1) / every)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> resolve.ResolvedTarget:
    """A CPU; the threads of this process stay as they are."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return resolve.resolve(TargetConfig("cpu", "float32", False, 0, "auto", False))


def watch(monkeypatch: pytest.MonkeyPatch, case: str) -> list[tuple[int, bool]]:
    """For each forward pass of the case from here on: its sequences, and whether torch may take the T x T kernel."""
    calls: list[tuple[int, bool]] = []
    owner, name = FORWARD[case]
    forward = getattr(owner, name)

    def watched(model: Any, ids_BT: torch.Tensor, *others: Any) -> Any:
        calls.append((len(ids_BT), torch.backends.cuda.math_sdp_enabled()))
        return forward(model, ids_BT, *others)

    monkeypatch.setattr(owner, name, watched)
    return calls


@pytest.mark.parametrize("case", [PLAIN, "B"])
@pytest.mark.parametrize(("effective", "micro", "times"), [(0, 4, 1), (12, 4, 3), (12, 6, 2)])
def test_every_case_has_equally_many_sequences_a_step_at_any_micro_batch(
    case: str,
    effective: int,
    micro: int,
    times: int,
    resolved: resolve.ResolvedTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = watch(monkeypatch, case)
    shape = dataclasses.replace(SHAPE, effective=effective)
    step, _, _ = case_step.case_step(shape, case, micro, resolved)
    step(0)
    assert [sequences for sequences, _ in calls] == [micro] * times


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
