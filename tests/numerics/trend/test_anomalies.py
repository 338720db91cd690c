"""Anomalies of a run: clean real runs have none, injected faults are found at their step and tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from numerics.trend.anomalies import HISTORY, NOT_FINITE, REFERENCE, find_anomalies
from numerics.trend.conclusion import analyse, sentences
from numerics.trend.tables import read_monitor
from tests.numerics.trend.monitor_files import names, noisy, write_monitor
from tests.numerics.trend.small_training import Fault, train

FAULTY, STEP = "blocks.0.linear1.weight", 90


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("clean"))


def change(operation: str) -> Fault:
    def fault(step: int, model: nn.Module) -> None:
        gradient = model.get_parameter(FAULTY).grad
        assert gradient is not None
        if step == STEP:
            if operation == "nan":
                gradient[0, 0] = torch.nan
            else:
                gradient *= float(operation)

    return fault


def test_clean_real_runs_have_no_anomaly(clean: Path, tmp_path: Path) -> None:
    runs = [clean, *(train(tmp_path / str(seed), seed=seed) for seed in (1,))]
    for run in runs:
        found = find_anomalies(read_monitor(run))
        assert found.tests > 900
        assert found.found == []


@pytest.mark.parametrize("operation", ["20", "0.03", "nan"])
def test_a_fault_of_a_real_run_is_found_at_its_step_and_tensor(
    operation: str, clean: Path, tmp_path: Path
) -> None:
    run = read_monitor(train(tmp_path, steps=STEP + 2, fault=change(operation)))
    first = find_anomalies(run).first
    assert first
    assert (first.step, first.name) == (STEP, FAULTY)
    assert (first.reason == NOT_FINITE) == (operation == "nan")
    against = find_anomalies(run, read_monitor(clean)).first
    assert against
    assert (against.step, against.name) == (STEP, FAULTY)


def test_rounding_in_two_runs_is_no_anomaly_and_a_fault_is(clean: Path, tmp_path: Path) -> None:
    def rounding(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + 2.0**-22 * (torch.rand_like(parameter) - 0.5)

    other = read_monitor(train(tmp_path / "rounding", fault=rounding))
    assert other.losses != read_monitor(clean).losses
    trend = analyse(other, read_monitor(clean))
    assert (trend.anomalies.found, trend.attribution.order, trend.attribution.persistent) == (
        [],
        "neither",
        [],
    )
    wrong = read_monitor(train(tmp_path / "wrong", steps=STEP + 2, fault=change("30")))
    first = find_anomalies(wrong, read_monitor(clean)).first
    assert first
    assert (first.step, first.name, first.reason) == (STEP, FAULTY, REFERENCE)


def test_backward_begins_at_the_last_layer(tmp_path: Path) -> None:
    norms = noisy(10, 100)
    norms[3:6, 70] = np.nan
    write_monitor(tmp_path, norms)
    write_monitor(tmp_path, norms, kind="actv")
    found = find_anomalies(read_monitor(tmp_path))
    assert [(one.step, one.kind, one.name) for one in found.found] == [
        *((71, "actv", names()[row]) for row in (3, 4, 5)),
        *((71, "grad_reduced", names()[row]) for row in (5, 4, 3)),
    ]
    assert {one.steps for one in found.found} == {1}


@pytest.mark.parametrize("written", [1, -1])
def test_the_order_of_backward_does_not_depend_on_the_file(tmp_path: Path, written: int) -> None:
    """Gradients of this rank and of activations in either order of rows; parameters and activations forward."""
    norms = noisy(4, 40)
    norms[1:3, 35] = np.nan
    layers = ["e", "a", "b", "h"]
    for kind, name in (("actv", "{}.output.0"), ("param", "{}.weight")):
        write_monitor(tmp_path, noisy(4, 40), kind=kind, tensors=[name.format(one) for one in layers])
    for kind, name in (("actv_grad", "{}.output_grad.0"), ("grad_unreduced", "{}.weight")):
        tensors = [name.format(one) for one in layers][::written]
        write_monitor(tmp_path, norms[::written], kind=kind, tensors=tensors)
    trend = analyse(read_monitor(tmp_path))
    names_of = ["b.output_grad.0", "a.output_grad.0", "b.weight", "a.weight"]
    assert [one.name for one in trend.anomalies.found] == names_of
    assert trend.ranks.not_finite
    assert trend.ranks.not_finite.name == "b.weight"
    text = " ".join(sentences(trend))
    assert "Before reduction the gradient is not finite at step 36, in b.weight first" in text
    assert "rank" not in text


def test_infinity_in_every_step_is_a_mask_and_nan_is_not(tmp_path: Path) -> None:
    norms = noisy(3, 60)
    zero = np.zeros_like(norms)
    infinite, nans = zero.copy(), zero.copy()
    infinite[0], norms[0] = 100, np.inf
    nans[1], norms[1] = 1, np.nan
    write_monitor(tmp_path, norms, kind="actv", more={"nan": nans, "inf": infinite})
    found = find_anomalies(read_monitor(tmp_path)).found
    assert [(one.name, one.step, one.steps) for one in found] == [(names()[1], 1, 60)]


def test_entropy_and_logits_of_attention_are_tested(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    entropy = 2 + 0.05 * generator.standard_normal((2, 120))
    logits = generator.standard_normal((2, 120))
    entropy[1, 100:] = 0.01
    logits[0, 90] = 80
    place = tmp_path / "monitor/rank0"
    place.mkdir(parents=True)
    lines = [
        f"0,blocks.{row}.sdpa.0,{step + 1},{entropy[row, step]},{logits[row, step]}"
        for step in range(120)
        for row in (0, 1)
    ]
    (place / "attention_0-999.csv").write_text(
        "\n".join(["vpp_stage,name,step,entropy,logit_max", *lines]) + "\n"
    )
    found = find_anomalies(read_monitor(tmp_path)).found
    assert [(one.step, one.name, one.statistic) for one in found] == [
        (91, "blocks.0.sdpa.0", "logit_max"),
        (101, "blocks.1.sdpa.0", "entropy"),
    ]


def write_ratios(folder: Path, ratios: np.ndarray) -> Path:
    write_monitor(folder, ratios, "update_ratio")
    (file,) = folder.rglob("update_ratio_*.csv")
    file.write_text(file.read_text().replace(",norm", ",ratio", 1))
    return folder


def test_the_ratio_of_zero_weights_and_a_rate_that_ends_at_zero_are_no_anomalies(tmp_path: Path) -> None:
    ratios = noisy(4, 100)
    ratios[2, :3] = np.inf  # a bias of zeros, with updates from step 3 on
    ratios[:, -1] = 0
    assert find_anomalies(read_monitor(write_ratios(tmp_path, ratios))).found == []


@pytest.mark.parametrize(("value", "reason"), [(np.inf, NOT_FINITE), (np.nan, NOT_FINITE), (1e3, HISTORY)])
def test_a_wrong_update_is_an_anomaly_of_its_ratio(tmp_path: Path, value: float, reason: str) -> None:
    ratios = noisy(4, 100)
    ratios[2, 0] = np.inf
    ratios[1, 60] = value
    (found,) = find_anomalies(read_monitor(write_ratios(tmp_path, ratios))).found
    assert (found.step, found.name, found.reason) == (61, names()[1], reason)
