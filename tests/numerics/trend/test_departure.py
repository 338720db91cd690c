"""The first differing value of two runs: found however small it is, and no difference of equal runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numerics.trend.conclusion import analyse, as_json, next_commands, sentences
from numerics.trend.departure import describe_departures, find_departures
from numerics.trend.tables import read_monitor
from tests.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor

STEPS = 40


def write(folder: Path, change: tuple[int, int, float] | None = None, loss: int | None = None) -> Path:
    """Write 5 tensors and losses. change: (tensor, step, factor). loss: the step from which it differs."""
    norms, means = noisy(5, STEPS), noisy(5, STEPS, 1)
    if change:
        norms[change[0], change[1] - 1] *= change[2]
    means[2, 3] = np.nan
    write_monitor(folder, norms, more={"mean": means})
    losses = np.linspace(3, 2, STEPS)
    if loss:
        losses[loss - 1 :] = np.nextafter(losses[loss - 1 :], 9)
    write_losses(folder, losses.tolist())
    return folder


def departure_text(a: Path, b: Path) -> str:
    return describe_departures(find_departures(read_monitor(b), read_monitor(a)))


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    assert "all 400 common values" in departure_text(a, b)
    trend = analyse(read_monitor(b), read_monitor(a))
    assert sentences(trend)[-1] == departure_text(a, b)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 4), st.integers(1, STEPS), st.sampled_from([1 + 3e-7, 1.02, 0.0, 1e30]))
def test_a_change_of_one_value_is_found(tmp_path: Path, tensor: int, step: int, factor: float) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", (tensor, step, factor))
    found = find_departures(read_monitor(b), read_monitor(a)).first
    assert found is not None
    assert (found.name, found.step, found.statistic) == (names()[tensor], step, "norm")
    assert found.relative == pytest.approx(abs(factor - 1) / max(factor, 1), rel=0.3)


def test_the_first_of_several_is_that_computed_first(tmp_path: Path) -> None:
    """Gradients are computed from the last layer back; the weights after them."""
    for name, factor in (("a", 1.0), ("b", 1.001)):
        norms = noisy(5, STEPS)
        norms[1:3, 9] *= factor
        write_monitor(tmp_path / name, norms)
        norms = noisy(5, STEPS)
        norms[:, 9] *= factor
        write_monitor(tmp_path / name, norms, kind="param")
    assert departure_text(tmp_path / "a", tmp_path / "b").startswith(
        f"First differing value: step 10, norm of grad_reduced {names()[2]} is "
    )
    assert "a relative difference of 0.001; no loss is common to both" in departure_text(
        tmp_path / "a", tmp_path / "b"
    )


def test_values_of_one_run_alone_are_no_difference(tmp_path: Path) -> None:
    write_monitor(tmp_path / "a", noisy(5, STEPS)[:, ::2], steps=range(1, STEPS + 1, 2))
    write_monitor(tmp_path / "b", noisy(5, STEPS)[:4], tensors=names()[:4])
    found = find_departures(read_monitor(tmp_path / "b"), read_monitor(tmp_path / "a"))
    assert (found.values, found.first) == (4 * STEPS // 2, None)
    broken = noisy(5, STEPS)
    broken[3, 6] = np.nan
    write_monitor(tmp_path / "c", broken)
    found = find_departures(read_monitor(tmp_path / "b"), read_monitor(tmp_path / "c"))
    assert found.first is not None
    assert (found.first.step, found.first.relative) == (7, None)


def test_a_loss_that_differs_in_its_last_bit_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", loss=12)
    assert "the loss differs from step 12, by +4.4e-16 nats there" in departure_text(a, b)
    content = as_json(analyse(read_monitor(b), read_monitor(a)), [])["first_differing_value"]
    assert (content["loss_step"], content["first"], content["values"]) == (12, None, 400)


@pytest.mark.parametrize("kinds", [(), ("actv",), ("actv", "param")])
def test_where_the_loss_is_first_the_kinds_to_look_at_are_monitored_next(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    norms = noisy(5, 150)
    norms[2, 110:113] *= 60
    write_monitor(tmp_path, norms)
    for kind in kinds:
        write_monitor(tmp_path, noisy(5, 150, 4), kind=kind)
    losses = 3 + 0.02 * np.random.default_rng(9).standard_normal(150)
    losses[103:108] += 2
    write_losses(tmp_path, losses.tolist(), np.sqrt(np.square(norms).sum(axis=0)).tolist())
    trend = analyse(read_monitor(tmp_path))
    missing = [kind for kind in ("actv", "param") if kind not in kinds]
    commands = next_commands(trend, lambda _, step: f"record {step}", lambda _, words: " ".join(words))
    assert commands == ["record 104", *([" ".join(missing)] if missing else [])]
    words = {
        0: "look at activations and weights first",
        1: "first; param is not",
        2: "first; actv and param are not",
    }
    assert words[len(missing)] in " ".join(sentences(trend))
