"""The bench: turns, ratios within rounds, and a plain step that computes what ours does."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from bench import runner as bench
from bench.reference_gpt import PlainGPT, PlainShape, take_weights
from gpt2.config.config import ModelConfig
from gpt2.system.errors import UserError
from gpt2.train.step import build_model

SHAPE = bench.Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4), ("RALEARN", 4), ("B", 8)), plain_micro=4)
SPREAD = ("median", "low", "high", "least", "most")


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
    shown = bench.text(SHAPE, list(rows.values()))
    assert "1.50 [1.50, 1.50]" in shown
    assert "a micro-batch an optimizer step" in shown
    assert "4 x 1" in shown


def test_a_case_that_cannot_run_is_told_of_and_left_out() -> None:
    told: list[str] = []

    def measure(shape: bench.Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if micro == 8:
            raise bench.BenchError("out of memory")
        return answer(100)

    kept: list[tuple[int, list[str]]] = []
    samples = bench.run(
        SHAPE, 2, 1.0, told.append, measure, lambda samples, reasons: kept.append((len(samples), reasons))
    )
    assert {(sample.case, sample.micro) for sample in samples} == {("plain", 4), ("B", 4), ("RALEARN", 4)}
    assert sum("left out: out of memory" in line for line in told) == 1
    assert kept == [(3, ["out of memory"]), (6, ["out of memory"])]


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


def test_a_stage_without_cases_is_none() -> None:
    for cases, names in (((("plain", 4),), [bench.NEW]), ((("RALEARN", 4),), [bench.HELD])):
        found = bench.stages(replace(SHAPE, cases=cases), True, 2, 3.0, None)
        assert [stage.name for stage in found] == names


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
    for parameter in ours.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    take_weights(plain, ours)
    ids = torch.randint(50, (3, 9), generator=generator)
    expected = ours.loss(ids[:, :-1], ids[:, 1:]).item()
    assert plain(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(expected, rel=1e-6)


# --- what is compared with what


def test_a_ratio_to_plain_is_to_its_default_micro_batch_and_to_no_other() -> None:
    def rows(*cases: tuple[str, int]) -> dict[str, Any]:
        shape = replace(SHAPE, cases=cases, effective=24, plain_micro=12)
        speeds = {("plain", 12): 100.0, ("plain", 8): 80.0, ("B", 8): 120.0}
        samples = bench.run(
            shape, 1, 0.0, lambda line: None, lambda s, case, micro, t: answer(speeds[case, micro])
        )
        found = bench.table(shape, samples, None)
        shown = bench.text(shape, found)
        assert "24 sequences an optimizer step" in shown
        assert "8 x 3" in shown
        return next(row for row in found if row["case"] == "B")

    both = rows(("plain", 8), ("plain", 12), ("B", 8))
    assert both["to_plain"]["median"] == pytest.approx(1.2)
    assert both["to_plain_same_micro"]["median"] == pytest.approx(1.5)
    one = rows(("plain", 8), ("B", 8))
    assert one["to_plain"] is None
    assert one["to_plain_same_micro"]["median"] == pytest.approx(1.5)


CASES = [case for shape in bench.SHAPES["cuda"] for case in shape.cases]


@given(st.sets(st.sampled_from(CASES), min_size=1))
def test_cases_are_chosen_by_name_and_micro_batch_and_keep_their_order(wanted: set[tuple[str, int]]) -> None:
    (shape,) = bench.chosen("cuda", "", [f"{case}@{micro}" for case, micro in wanted])
    assert shape.cases == tuple(case for case in CASES if case in wanted)
    (whole,) = bench.SHAPES["cuda"]
    assert replace(shape, cases=whole.cases) == whole


def test_a_name_alone_is_a_case_at_all_its_micro_batches_and_no_name_is_all_cases() -> None:
    (shape,) = bench.chosen("cuda", "", ["B", "RALEARN:hard"])
    assert shape.cases == (("B", 12), ("B", 32), ("RALEARN:hard", 32), ("B", 64))
    assert bench.chosen("cpu", "", []) == list(bench.SHAPES["cpu"])
    (small,) = bench.chosen("cpu", "", ["B@12"])  # a shape of which nothing is wanted is left out
    assert (small.name, small.cases) == ("6x384-t256", (("B", 12),))


@pytest.mark.parametrize("name", ["XB", "B@7", "ralearn", "RALEARN:hard:9"])
def test_a_case_that_does_not_exist_is_an_error_of_one_line_that_lists_those_that_do(name: str) -> None:
    start = rf"no case is called '{name}' here; there are plain \(plain@12, plain@32\), B"
    with pytest.raises(UserError, match=start) as told:
        bench.chosen("cuda", "", ["B", name])
    assert "\n" not in str(told.value)
    assert "RALEARN:hard:8" in str(told.value)
