"""Trends: a clean run has no row, a fault is named at its step and tensor, and so is where two runs depart."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2.watch import Triggers
from referee.numerics.diagnose.symptoms import diagnose, pair_curves
from referee.numerics.rows import TableRow
from referee.numerics.trend.trend import read_run, trend
from referee.verdict.loss_files import LossCurve
from tests.referee.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor

Floats = NDArray[np.float64]
AT, STEP = 3, 60  # the faulty tensor


def run_of(folder: Path, norms: Floats) -> Path:
    """Write the norms of gradients, with the losses of a sound training."""
    write_monitor(folder, norms)
    losses = 4 + noisy(1, norms.shape[1], 9, 0.001)[0] * 0.01
    write_losses(folder, losses.tolist(), np.sqrt(np.square(np.nan_to_num(norms)).sum(axis=0)).tolist())
    return folder


def first(rows: list[TableRow]) -> tuple[str, str]:
    return rows[0].call, rows[0].place


@pytest.mark.parametrize("seed", range(8))
def test_a_clean_run_has_no_row(seed: int, tmp_path: Path) -> None:
    assert trend(run_of(tmp_path, noisy(12, 120, seed))) == []


@pytest.mark.parametrize("factor", [100, 0.01, np.nan])
def test_a_fault_is_named_at_its_step_and_tensor(factor: float, tmp_path: Path) -> None:
    norms = noisy(12, STEP + 2)
    clean = run_of(tmp_path / "clean", norms)
    norms[AT, STEP - 1] *= factor
    faulty = run_of(tmp_path / "faulty", norms)
    for rows in (trend(faulty), trend(faulty, clean)):
        named = [row for row in rows if row.bound > 0 or row.golden == "finite"]
        assert first(named) == (f"grad_reduced {names()[AT]}", f"step {STEP}")


def test_rounding_in_two_runs_is_a_first_unequal_value_alone(tmp_path: Path) -> None:
    norms = noisy(12, 80)
    clean = run_of(tmp_path / "clean", norms)
    rounded = run_of(tmp_path / "rounded", norms * (1 + 2.0**-22 * noisy(12, 80, 1)))
    (row,) = trend(rounded, clean)
    assert row.place == "first unequal, step 1"
    assert trend(clean, clean) == []


def test_triggers_trend_and_diagnose_name_one_step_of_a_jump(tmp_path: Path) -> None:
    """Of a loss that jumps and stays apart, as after one update with a hundredfold rate."""
    losses = (4.6 + 0.01 * np.random.default_rng(0).standard_normal(60)).tolist()
    good = LossCurve("good", dict(enumerate(losses, 1)))
    losses = [loss + 0.64 * 0.95 ** max(0, step - 41) * (step >= 41) for step, loss in enumerate(losses, 1)]
    bad = LossCurve("bad", dict(enumerate(losses, 1)))
    triggers = Triggers(["spike"])
    fired = [one.step for step, loss in enumerate(losses, 1) for one in triggers.observe(step, loss, 1.0)]
    write_monitor(tmp_path, noisy(1, 60))
    write_losses(tmp_path, losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (row,) = trend(tmp_path)
    found = diagnose(pair_curves(good, bad)).finding
    assert (fired[0], row.place, found.step) == (41, "step 41", 41)


def test_the_order_within_a_step_is_that_of_computation(tmp_path: Path) -> None:
    """Activations forward, then gradients from the last layer on, in either order of the file."""
    norms = noisy(4, 40)
    norms[1:3, 35] = np.nan
    layers = ["e", "a", "b", "h"]
    for kind, name in (("actv", "{}.output.0"), ("param", "{}.weight")):
        write_monitor(tmp_path, noisy(4, 40), kind=kind, tensors=[name.format(one) for one in layers])
    for kind, name in (("actv_grad", "{}.output_grad.0"), ("grad_unreduced", "{}.weight")):
        tensors = [name.format(one) for one in layers][::-1]
        write_monitor(tmp_path, norms[::-1], kind=kind, tensors=tensors)
    expected = ["actv_grad b.output_grad.0", "actv_grad a.output_grad.0", "grad_unreduced b.weight"]
    assert [row.call for row in trend(tmp_path)] == [*expected, "grad_unreduced a.weight"]


def test_infinity_in_every_step_is_a_mask_and_nan_is_not(tmp_path: Path) -> None:
    norms = noisy(3, 60)
    infinite, nans = np.zeros_like(norms), np.zeros_like(norms)
    infinite[0], norms[0] = 100, np.inf
    nans[1], norms[1] = 1, np.nan
    write_monitor(tmp_path, norms, kind="actv", more={"nan": nans, "inf": infinite})
    assert [(row.call, row.place) for row in trend(tmp_path)] == [(f"actv {names()[1]}", "step 1")]


def test_entropy_and_logits_of_attention_are_tested(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    entropy = 2 + 0.05 * generator.standard_normal((2, 120))
    logits = generator.standard_normal((2, 120))
    entropy[1, 100:], logits[0, 90] = 0.01, 80
    write_monitor(
        tmp_path, entropy, "attention", tensors=["a", "b"], more={"logit_max": logits}, column="entropy"
    )
    assert [(row.call, row.side, row.place) for row in trend(tmp_path)] == [
        ("attention a", "logit_max", "step 91"),
        ("attention b", "entropy", "step 101"),
    ]


def test_an_update_ratio_may_begin_at_infinity_and_end_at_zero(tmp_path: Path) -> None:
    ratios = noisy(4, 100)
    ratios[2, 1:3], ratios[:, ::99] = np.inf, 0  # a bias of zeros; a rate that begins and ends at 0
    write_monitor(tmp_path / "clean", ratios, "update_ratio", column="ratio")
    assert trend(tmp_path / "clean") == []
    for value in (np.inf, np.nan, 1e3):
        ratios[1, 60] = value
        write_monitor(tmp_path / "wrong", ratios, "update_ratio", column="ratio")
        assert first(trend(tmp_path / "wrong")) == (f"update_ratio {names()[1]}", "step 61")


@pytest.mark.parametrize(("share", "wrong"), [(1.0, False), (0.5, False), (0.8, True)])
def test_the_reduction_is_the_sum_or_the_mean_of_the_ranks(tmp_path: Path, share: float, wrong: bool) -> None:
    generator = np.random.default_rng(0)
    means = generator.standard_normal((2, 8, 40))
    reduced = means.sum(axis=0) * (1.0 if wrong else share)
    reduced[3] *= share if wrong else 1.0
    for rank in (0, 1):
        write_monitor(tmp_path, noisy(8, 40, 1), "grad_unreduced", rank, more={"mean": means[rank]})
        write_monitor(tmp_path, noisy(8, 40, 2), "grad_reduced", rank, more={"mean": reduced})
    assert [row.call for row in trend(tmp_path)] == [f"grad_reduced {names()[3]}"] * wrong


def test_the_rank_that_is_not_finite_is_named(tmp_path: Path) -> None:
    norms = noisy(4, 30)
    write_monitor(tmp_path, norms, "grad_unreduced", 0)
    bad = norms.copy()
    bad[2, 20] = np.nan
    write_monitor(tmp_path, bad, "grad_unreduced", 1)
    assert [(row.call, row.place) for row in trend(tmp_path)] == [
        (f"grad_unreduced {names()[2]}", "step 21, rank 1")
    ]


def test_names_of_msprobe_are_read(tmp_path: Path) -> None:
    """Columns as msProbe's writer names them: micro steps, virtual pipeline stages, older columns."""
    place = tmp_path / "Dec03_21-34-40-rank7-ab12"
    place.mkdir()
    lines = ["vpp_stage,name,step,micro_step,norm,nans", "0,l.0,0,0,1,0", "0,l.0,0,1,2,0", "1,l.0,0,0,3,1"]
    (place / "actv_0-0.csv").write_text("\n".join(lines) + "\n")
    (place / "param_origin_0-0.csv").write_text("vpp_stage,param_name,step,norm,shape\n0,w,0,6,2\n0,w")
    found = read_run(tmp_path).tables
    assert found["actv", 7].names == ["l.0", "l.0:micro1", "1:l.0"]
    assert found["actv", 7].values["nan"].ravel().tolist() == [0.0, 0.0, 1.0]
    assert found["param_origin", 7].values["norm"].tolist() == [[6.0]]
