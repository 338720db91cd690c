"""The bench: turns, ratios within rounds, and a plain step that computes what ours does."""

import dataclasses
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from gpt2.config import ModelConfig
from gpt2.step import build_model
from scripts.bench import model_and_attention, shares
from study import bench
from study.plain import PlainGPT, PlainShape

SHAPE = bench.Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4), ("RALEARN", 4), ("B", 8)))
SPREAD = ("median", "low", "high", "least", "most")
THEIR_NAMES = {"attention.qkv": "qkv", "attention.proj": "proj", "mlp.fc": "wide", "mlp.proj": "narrow"}


def answer(speed: float) -> dict[str, Any]:
    return {
        "step_seconds": 1.0,
        "tokens_per_second": speed,
        "peak_bytes": int(speed) * 2**20,
        "flops_per_token": 100.0,
        "nanogpt_flops_per_token": 110.0,
    }


def test_the_cases_take_turns_and_a_drift_of_the_machine_cancels_in_the_ratios() -> None:
    order = []

    def measure(shape: bench.Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        drift = 1.0 + 0.5 * (len(order) // len(SHAPE.cases))  # each round on a faster machine
        order.append((case, micro))
        return answer(drift * {"plain": 100, "B": 150, "RALEARN": 120}[case])

    samples = bench.run(SHAPE, 3, 1.0, lambda line: None, measure)
    assert order == list(SHAPE.cases) * 3
    rows = {(row["case"], row["micro"]): row for row in bench.table(SHAPE, samples, 1e5)}
    assert rows["B", 4]["to_plain"] == pytest.approx(dict.fromkeys(SPREAD, 1.5))
    assert rows["RALEARN", 4]["to_baseline"] == pytest.approx(dict.fromkeys(SPREAD, 0.8))
    assert rows["B", 8]["to_plain_same_micro"] is None
    assert rows["B", 4]["memory_to_plain_same_micro"] == pytest.approx(1.5)
    assert rows["B", 4]["mfu"] == pytest.approx(225 * 100 / 1e5)
    assert "1.50 [1.50, 1.50]" in bench.text(SHAPE, list(rows.values()))


def test_a_case_that_cannot_run_is_told_of_and_left_out() -> None:
    told: list[str] = []

    def measure(shape: bench.Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if micro == 8:
            raise bench.BenchError("out of memory")
        return answer(100)

    samples = bench.run(SHAPE, 2, 1.0, told.append, measure)
    assert {(sample.case, sample.micro) for sample in samples} == {("plain", 4), ("B", 4), ("RALEARN", 4)}
    assert sum("left out: out of memory" in line for line in told) == 1


@pytest.mark.parametrize("case", ["plain", "RALEARN:hard", "RALEARN:hard:8"])
def test_a_case_is_measured_in_a_process(case: str) -> None:
    seen = bench.in_a_process(SHAPE, case, 4, 0.0)
    assert seen["tokens_per_second"] == pytest.approx(4 * 8 / seen["step_seconds"])
    assert seen["peak_bytes"] > 0


def test_held_processes_take_turns_step_by_step_and_end_with_the_bench() -> None:
    with bench.Held() as measure:
        for _ in range(3):
            for case in ("plain", "B"):
                assert measure(SHAPE, case, 4, 0.0)["step_seconds"] > 0
        processes = [running.process for running in measure._running.values()]
        assert len(processes) == 2
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes)


def test_a_case_that_fails_in_its_process_gives_its_last_words() -> None:
    with pytest.raises(bench.BenchError, match=r"small, XB at micro-batch 4: .*XB"), bench.Held() as measure:
        measure(SHAPE, "XB", 4, 0.0)


def test_a_process_that_is_killed_is_told_of_by_its_signal_and_stray_lines_are_passed_over() -> None:
    with bench.Running(SHAPE, "B", 4) as running:
        assert running.steps(0.0)["step_seconds"] > 0
        running.process.kill()
        with pytest.raises(bench.BenchError, match="killed by SIGKILL"):
            running.steps(0.0)
    with bench.Running(SHAPE, "B", 4) as running:
        running.process.stdout = iter(["said by a library\n", "[1]\n", '{"step_seconds": 1.0}\n'])  # type: ignore[assignment]
        assert running.steps(0.0) == {"step_seconds": 1.0}


def test_a_gate_that_moves_every_8th_step_weighs_its_dear_step_by_an_eighth() -> None:
    assert sum(shares("RALEARN:hard:8")) == 1.0
    assert shares("RALEARN:hard:8")[0] == 1 / 8
    assert shares("B") == shares("RALEARN:hard") == (1.0,)
    _, attention = model_and_attention(dataclasses.asdict(SHAPE), "RALEARN:hard:8")
    layer = attention(0)
    for iteration, dear in ((0, True), (1, False)):
        layer.begin_step(iteration)
        assert layer.measures == dear


@settings(max_examples=60, deadline=None)
@given(rounds=st.integers(6, 40), seed=st.integers(0, 999))
def test_the_interval_of_a_median_is_the_narrowest_that_the_sign_test_allows(rounds: int, seed: int) -> None:
    values = random.Random(seed).sample(range(1000), rounds)
    seen = bench.spread([float(value) for value in values])
    assert seen
    assert seen["least"] <= seen["low"] <= seen["median"] <= seen["high"] <= seen["most"]
    for bound in (seen["low"], seen["high"]):
        beyond = min(sum(value < bound for value in values), sum(value > bound for value in values))
        assert binomtest(beyond, rounds).pvalue <= 0.05  # a median outside of the interval is refused
        assert binomtest(beyond + 1, rounds).pvalue > 0.05  # one further inside is not


def test_on_a_cpu_the_plain_step_meets_the_baseline_alone_and_the_variants_meet_it_in_held_processes() -> (
    None
):
    enough = 3 * bench.held_bytes(SHAPE)
    for free in (None, enough):
        alone, held = bench.stages(SHAPE, True, 2, 3.0, free)
        assert alone.shape.cases == (("plain", 4), ("B", 4), ("B", 8))
        assert held.shape.cases == (("B", 4), ("RALEARN", 4), ("B", 8))
        assert (alone.rounds, alone.seconds, held.rounds, held.seconds) == (2, 3.0, 6, 0.0)
        assert isinstance(held.turns(), bench.Held)
    for stage in bench.stages(SHAPE, True, 2, 3.0, enough - 1):  # too little memory to hold them all
        with stage.turns() as measure:
            assert measure is bench.in_a_process
        assert (stage.rounds, stage.seconds) == (2, 3.0)
    (all_at_once,) = bench.stages(SHAPE, False, 2, 3.0, None)
    assert all_at_once.shape == SHAPE


def test_what_a_held_process_holds_is_not_underestimated_at_the_size_that_was_measured() -> None:
    """GPT-2 124M at 2 x 256 tokens held 2.3 GiB; six of them fit a machine with 16 GiB free, not one with 12."""
    shape = next(shape for shape in bench.SHAPES["cpu"] if shape.name == "124m-t256")
    assert 2.3 <= bench.held_bytes(shape) / 2**30 <= 3.5


def test_few_rounds_give_their_range() -> None:
    assert bench.spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "low": 1.0,
        "high": 3.0,
        "least": 1.0,
        "most": 3.0,
    }


def test_the_plain_model_is_the_same_function_as_ours() -> None:
    ours, plain = (
        build_model(ModelConfig("small", 2, 2, 16, 8, 0.0, 50, 64), None),
        PlainGPT(PlainShape(2, 2, 16, 8, 50)),
    )
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, parameter in ours.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        for own, other in THEIR_NAMES.items():
            name = name.replace(own, other)
        state[name] = parameter.data
    state["token.weight"] = state["head.weight"] = state["token.weight"][:50]
    plain.load_state_dict(state)
    ids = torch.randint(50, (3, 9), generator=generator)
    expected = ours.loss(ids[:, :-1], ids[:, 1:]).item()
    assert plain(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(expected, rel=1e-6)


def test_a_shape_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "--shape", "none"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no shape is called 'none' here; there are" in done.stderr
