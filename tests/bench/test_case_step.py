"""Timing of a case on a simulated GPU, its peak memory, and the sequences of its step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import case_step, reference_gpt
from bench.case_step import SMALLEST, WARM_UP_STEPS, make_stepper, mix_of, model_and_parts, timed_step
from bench.cases import BLOCK_STEPS, PLAIN, SHAPES, Shape
from bench.reference_gpt import PlainGPT, PlainStep
from gpt2.config.config import ANY_TARGET, TargetConfig
from gpt2.hardware import attention_kernels, resolve
from gpt2.hardware.attention_kernels import prepare_device
from gpt2.model.transformer import GPT2
from gpt2.train.step import Stepper

SHAPE = Shape("small", 2, 2, 16, 8, ())
FORWARD = {PLAIN: (PlainGPT, "forward"), "B": (GPT2, "hidden")}


class SimulatedGpu:
    """A host that launches a step in `launch` seconds and a device that computes it asynchronously."""

    def __init__(self, work: Callable[[int], float], launch: float = 1.0) -> None:
        self.work, self.launch = work, launch
        self.host = self.device = 0.0
        self.synchronised, self.iterations = 0, list[int]()

    def step(self, iteration: int) -> None:
        self.iterations.append(iteration)
        self.host += self.launch
        self.device = max(self.device, self.host) + self.work(iteration)

    def synchronise(self) -> None:
        self.synchronised += 1
        self.host = max(self.host, self.device)

    def clock(self) -> float:
        return self.host


def on_a_gpu(machine: SimulatedGpu, case: str) -> float:
    return timed_step(machine.step, case, machine.synchronise, True, machine.clock)


# --- timing


@given(work=st.floats(2, 100), case=st.sampled_from([PLAIN, "B", "RALEARN"]))
def test_on_a_gpu_a_step_is_charged_the_device_s_time_and_an_eighth_of_one_launch(
    work: float, case: str
) -> None:
    """Synchronised after every step it would be charged a whole launch."""
    machine = SimulatedGpu(lambda iteration: work)
    for number in (1, 2):
        assert on_a_gpu(machine, case) == pytest.approx(work + 1 / BLOCK_STEPS)
        assert machine.synchronised == number
    assert machine.iterations == [*range(BLOCK_STEPS), *range(BLOCK_STEPS)]


@given(every=st.integers(1, 20), dear=st.floats(0, 50))
def test_on_a_gpu_a_gate_update_every_k_steps_costs_as_in_training(every: int, dear: float) -> None:
    machine = SimulatedGpu(lambda iteration: 10 + dear * (iteration % every == 0))
    seconds = on_a_gpu(machine, f"RALEARN:hard:{every}")
    block = len(machine.iterations)
    assert block >= BLOCK_STEPS
    assert block % every == 0
    assert seconds == pytest.approx(10 + dear / every + 1 / block)


def test_the_gate_of_every_8th_step_fits_the_block_of_all_the_others() -> None:
    machine = SimulatedGpu(lambda iteration: 18 if iteration % 8 == 0 else 10)
    assert on_a_gpu(machine, "RALEARN:hard:8") == pytest.approx(11 + 1 / 8)
    assert machine.iterations == list(range(8))


@given(every=st.integers(2, 20))
def test_on_a_cpu_each_kind_of_step_is_timed_once_and_weighted_by_its_share(every: int) -> None:
    machine = SimulatedGpu(lambda iteration: 0.0)

    def step(iteration: int) -> None:
        machine.host += 18 if iteration % every == 0 else 10

    def seconds(case: str) -> float:
        return timed_step(step, case, machine.synchronise, False, machine.clock)

    assert seconds("B") == seconds("RALEARN:hard") == pytest.approx(18.0)
    assert seconds(f"RALEARN:hard:{every}") == pytest.approx(18 / every + 10 * (every - 1) / every)
    assert machine.synchronised == 0


def test_a_gate_that_moves_every_8th_step_moves_at_the_first_of_eight() -> None:
    _, parts = model_and_parts(SHAPE, "RALEARN:hard:8")
    assert parts.attention
    layer = parts.attention(0)
    for iteration, dear in ((0, True), (1, False)):
        layer.begin_step(iteration)
        assert layer.updates_gate == dear


# --- a prepared case


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> resolve.ResolvedTarget:
    """A CPU; the threads of this process stay as they are."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return resolve.resolve(TargetConfig("cpu", "float32", False, 0, "auto", False))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, resolved: resolve.ResolvedTarget) -> list[int]:
    """The iterations of a step that only counts. It needs 100 bytes at first and 10 afterwards, beside 3 of a model."""
    iterations: list[int] = []
    highest = 0

    def step(iteration: int) -> None:
        nonlocal highest
        highest = max(highest, 10 if iterations else 100)
        iterations.append(iteration)

    def reset(device: Any) -> None:
        nonlocal highest
        highest = 3

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: highest)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: highest)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_gpu = dataclasses.replace(resolved, device="cuda:0")
    monkeypatch.setattr(attention_kernels, "prepare_device", lambda config, model: on_gpu)
    monkeypatch.setattr(case_step, "case_step", lambda *arguments: (step, 100.0, 110.0))
    return iterations


def test_a_case_is_warmed_up_once_and_its_peak_is_that_of_the_timed_steps(steps: list[int]) -> None:
    for turns in (1, 2):
        found = case_step.time_case(SHAPE, PLAIN, 4, 0.0)
        assert steps == [*range(WARM_UP_STEPS), *[*range(BLOCK_STEPS)] * turns]
        assert found["peak_bytes"] == 10
        assert found["tokens_per_second"] == pytest.approx(4 * 8 / found["step_seconds"])
    assert case_step.prepare_case(SHAPE, PLAIN, 4).meter.peaks()["allocated"] == 100


def test_steps_are_timed_until_the_seconds_are_over(
    steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_step.time, "perf_counter", lambda: 10.0 * len(steps))
    monkeypatch.setattr(case_step, "timed_step", lambda step, *others: step(0) or 1.0)
    case_step.time_case(SHAPE, PLAIN, 4, 25.0)
    assert len(steps) == WARM_UP_STEPS + 3


# --- the step


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


@pytest.mark.parametrize(("case", "usual"), [(PLAIN, True), ("B", False)])
def test_only_our_step_is_restricted_to_the_fused_kernels(
    case: str,
    usual: bool,
    resolved: resolve.ResolvedTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = watch(monkeypatch, case)
    monkeypatch.setattr(attention_kernels, "prepare_device", lambda config, model: resolved)
    assert case_step.time_case(SHAPE, case, 4, 0.0)["peak_bytes"] >= 0
    assert calls[1:] == [(4, usual)] * (WARM_UP_STEPS + 1)  # after the smallest shape, which loads libraries


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


def test_on_a_gpu_every_case_runs_the_same_step_and_on_a_cpu_one_of_its_micro_batch() -> None:
    for kind, shapes in SHAPES.items():
        for shape in shapes:
            assert (PLAIN, shape.plain_micro) in shape.cases
            for _, micro in shape.cases:
                assert shape.accumulation(micro) * micro == (192 if kind == "card" else micro)


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


@pytest.mark.parametrize(
    ("case", "mix"), [("B", ("", 1)), ("RALEARN:score", ("score", 1)), ("RALEARN:hard:8", ("hard", 8))]
)
def test_a_case_names_its_mix_and_the_steps_between_two_gate_gradients(
    case: str, mix: tuple[str, int]
) -> None:
    assert mix_of(case) == mix


def test_an_arm_with_noise_draws_it_in_every_timed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steppers: list[Stepper] = []

    def build(*given: Any) -> Stepper:
        steppers.append(make_stepper(*given))
        return steppers[-1]

    monkeypatch.setattr(case_step, "make_stepper", build)
    resolved = prepare_device(ANY_TARGET, case_step.model_config(SMALLEST))
    step, _, _ = case_step.case_step(SMALLEST, "B+AQN=qerl", 1, resolved)
    drawn = []
    for iteration in range(2):
        step(iteration)
        drawn.append([value.clone() for name, value in steppers[0].model.named_buffers() if "noise" in name])
    assert len(drawn[0]) == 2
    for one, other in zip(*drawn, strict=True):
        assert one.abs().min() > 0
        assert not torch.equal(one, other)
