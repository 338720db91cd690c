"""What came first, which tensor carries the gradient norm, which rank deviates, and the guide's case 3.2.1.3."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics.__main__ import main
from numerics.trend.attribution import layer_of
from numerics.trend.conclusion import Trend, analyse, next_commands, sentences
from numerics.trend.ranks import binomial_tail
from numerics.trend.tables import read_monitor
from tests.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor
from tests.numerics.trend.small_training import train

STEPS = 150


def analysed(folder: Path, reference: Path | None = None) -> Trend:
    return analyse(read_monitor(folder), read_monitor(reference) if reference else None)


def write(folder: Path, norm_step: int | None, loss_step: int | None, row: int = 6) -> None:
    """Spikes of one tensor's gradient, and of the loss."""
    norms = noisy(14, STEPS)
    if norm_step:
        norms[row, norm_step - 1 : norm_step + 2] *= 60
    losses = 3 + 0.02 * np.random.default_rng(9).standard_normal(STEPS)
    if loss_step:
        losses[loss_step - 1 : loss_step + 4] += 2
    write_monitor(folder, norms)
    write_losses(folder, losses.tolist(), np.sqrt(np.square(norms).sum(axis=0)).tolist())


@pytest.mark.parametrize(
    ("norm_step", "loss_step", "order", "words"),
    [
        (100, 104, "gradient norm first", "from step 100, before the loss (step 104)"),
        (110, 104, "loss first", "from step 104, before the gradient norm (step 110)"),
        (100, 100, "same step", "from the same step, 100"),
        (100, None, "gradient norm only", "from step 100; the loss is not."),
        (
            None,
            104,
            "loss only",
            "from step 104; the gradient norm is not; actv and param are not monitored.",
        ),
        (None, None, "neither", "No anomaly"),
    ],
)
def test_what_came_first(
    tmp_path: Path, norm_step: int | None, loss_step: int | None, order: str, words: str
) -> None:
    write(tmp_path, norm_step, loss_step)
    trend = analysed(tmp_path)
    found = trend.attribution
    assert (found.order, found.norm_step, found.loss_step) == (order, norm_step, loss_step)
    assert words in " ".join(f"{one}." for one in sentences(trend))
    if norm_step:
        top = found.carriers[0]
        assert top.name == names()[6]
        assert found.steps == [100, 101, 102] if norm_step == 100 else [110, 111, 112]
        assert top.share > 0.9
        assert top.correlation is not None
        assert top.correlation > 0.9
        assert next(iter(found.layers)) == layer_of(top.name) == "blocks.1"


def test_shares_are_those_of_the_squared_norm(tmp_path: Path) -> None:
    """An independent computation with the noise left out."""
    norms = noisy(4, 100, noise=0.0) / (1 + 2 * np.exp(-np.arange(100) / 20))
    before = norms[:, 80].copy()
    norms[1, 80] *= 10
    norms[2, 80] *= 5
    write_monitor(tmp_path, norms)
    found = analysed(tmp_path).attribution
    excess = {1: 99 * before[1] ** 2, 2: 24 * before[2] ** 2}
    shares = {one.name: one.share for one in found.carriers}
    for row, size in excess.items():
        assert shares[names()[row]] == pytest.approx(size / sum(excess.values()), rel=1e-4)
    assert found.excess == pytest.approx(sum(excess.values()) / (before**2).sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.qkv.weight", "blocks.3"),
        ("transformer.h.11.mlp.0.bias", "transformer.h.11"),
        ("embedding.weight", "embedding"),
        ("transformer.wte.weight", "transformer.wte"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(("steps", "tested"), [(20, 0), (200, 200 - 31)])
def test_a_run_with_too_few_monitored_steps_has_a_next_command(
    tmp_path: Path, steps: int, tested: int
) -> None:
    write_monitor(tmp_path, noisy(14, steps))
    found = next_commands(analysed(tmp_path), lambda _, step: str(step))
    assert bool(found) == (tested == 0), found
    assert not found or ("CONFIG_MONITOR_INTERVAL=1" in found[0] and f"only {tested} of {steps}" in found[0])


def test_the_next_command_names_the_first_anomaly(tmp_path: Path) -> None:
    """The rate of step 100 is too large, so the gradient norm is anomalous from step 101."""
    write(tmp_path, 101, None)
    ratios = noisy(14, STEPS, seed=3)
    ratios[:, 99] *= 100
    write_monitor(tmp_path, ratios, kind="param")
    trend = analysed(tmp_path)
    assert (trend.attribution.norm_step, "First anomaly: step 100" in sentences(trend)[0]) == (101, True)
    assert next_commands(trend, lambda _, step: str(step)) == ["100"]


@pytest.mark.parametrize(
    ("steps", "bad", "words"),
    [
        (range(1, 101), 0, "(276 values in 69 of 100 steps;"),
        (range(1, 101), 2, "(76 values in 19 of 100 steps;"),
        (range(1, 6), 0, "Nothing is tested: at most 5 steps are common"),
    ],
)
def test_only_values_with_a_reference_are_counted(tmp_path: Path, steps: range, bad: int, words: str) -> None:
    norms = noisy(4, 100)
    write_monitor(tmp_path / "b", norms)
    base = norms[:, steps.start - 1 : steps.stop - 1].copy()
    if bad:
        base[:, ::bad] = np.nan
    write_monitor(tmp_path / "a", base, steps=steps)
    said = sentences(analysed(tmp_path / "b", tmp_path / "a"))[0]
    assert words in said
    assert ("No anomaly" in said) == ("values in" in words)


@pytest.mark.parametrize(("first", "factor", "ratio"), [(1, 2000, "2e+03"), (12, 2000, "2e+03"), (1, 0, "0")])
def test_the_first_difference_is_before_the_first_tested_step(
    tmp_path: Path, first: int, factor: int, ratio: str
) -> None:
    norms = noisy(6, 160)
    write_monitor(tmp_path / "a", norms)
    norms[2:4, first - 1 :] *= factor
    write_monitor(tmp_path / "b", norms)
    trend = analysed(tmp_path / "b", tmp_path / "a")
    said = sentences(trend)[0]
    assert said.startswith(f"First difference: step {first}, grad_reduced of {names()[3]} is {ratio} times")
    assert f"over 6 % in {161 - first} of 160 common steps. First anomaly: step 32, " in said
    assert "before step 32 only values that are not finite were tested" in said
    assert next_commands(trend, lambda _, step: str(step)) == [str(first)] * 2


def test_gradients_of_an_embedding_in_bfloat16_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case 3.2.1.3 of the guide: a model in float32 against one whose embedding sums its gradients in bfloat16."""
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        train(tmp_path / name, steps=25, dtype=dtype, length=256)
    out = tmp_path / "out"
    assert main(["trend", str(tmp_path / "float32"), str(tmp_path / "bfloat16"), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((out / "trend.json").read_text())
    top = found["attribution"]["tensors"][0]
    assert top["name"] == "embedding.weight"
    assert abs(top["share"]) > 0.5
    assert "embedding.weight carries" in printed
    assert "3.2.1.3" in " ".join(printed.split())
    assert "A possibility: compare the settings of the runs first (make diagnose), then check" in " ".join(
        printed.split()
    )
    assert [one["name"] for one in found["attribution"]["persistent"]] == ["embedding.weight"]
    assert "next: record step 1 of" in printed


@pytest.mark.parametrize(
    ("factors", "dtypes", "said"),
    [
        ({0: 0.6}, ("", ""), True),
        ({0: 0.6}, ("float32", "bfloat16"), True),
        ({0: 0.6}, ("float32", "float32"), False),
        ({0: 0.6, 5: 0.5}, ("", ""), False),  # another tensor differs, too
    ],
)
def test_an_embedding_is_no_rounding_where_something_contradicts(
    tmp_path: Path, factors: dict[int, float], dtypes: tuple[str, str], said: bool
) -> None:
    norms = noisy(14, 25)
    norms[0] *= 100
    for name, dtype in zip("ab", dtypes, strict=True):
        if name == "b":
            for row, factor in factors.items():
                norms[row] *= factor
        write_monitor(tmp_path / name, norms)
        if dtype:
            (tmp_path / name / "run.json").write_text(json.dumps({"target": {"dtype": dtype}}))
    text = " ".join(sentences(analysed(tmp_path / "b", tmp_path / "a")))
    assert "embedding.weight carries" in text
    assert ("3.2.1.3" in text) == said


def test_tensors_of_one_run_are_listed_and_the_others_are_attributed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference has a frozen layer of four parameters, and the run is monitored with weights."""
    norms = noisy(14, 100)
    frozen = {5, 6, 7, 8}
    rows = [row for row in range(14) if row not in frozen]
    write_monitor(tmp_path / "a", norms[rows], tensors=[names()[row] for row in rows])
    norms[2, 79:] *= 60
    write_monitor(tmp_path / "b", norms)
    write_monitor(tmp_path / "b", noisy(14, 100), kind="param")
    assert main(["trend", *(str(tmp_path / one) for one in "ab"), "-o", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/trend.json").read_text())
    assert found["only_in_one_run"] == [
        {"run": "b", "kinds": ["param"], "tensors": [names()[row] for row in sorted(frozen)]}
    ]
    assert found["attribution"]["tensors"][0]["name"] == names()[2]
    assert len(found["attribution"]["tensors"]) == 10
    listed = f"Only b has 4 tensors, so nothing is compared there: {', '.join(names()[5:8])}, ..."
    for text in (capsys.readouterr().out, (tmp_path / "out/trend.html").read_text()):
        assert listed in " ".join(text.split())
        assert "Only b has tables of param" in " ".join(text.split())


def ranks(folder: Path, count: int = 4, steps: int = 200) -> list[np.ndarray]:
    """Norms and means of the ranks of one run."""
    return [noisy(14, steps, seed=7, noise=0.0) * np.exp(0.2 * np.random.default_rng(rank).standard_normal((14, steps)))
            for rank in range(count)]  # fmt: skip


def write_ranks(folder: Path, norms: list[np.ndarray], reduce: str = "sum", lost: int | None = None) -> None:
    means = [
        0.01 * np.random.default_rng(100 + rank).standard_normal(one.shape) for rank, one in enumerate(norms)
    ]
    for rank, (norm, mean) in enumerate(zip(norms, means, strict=True)):
        write_monitor(folder, norm, "grad_unreduced", rank, more={"mean": mean})
    parts = [mean for rank, mean in enumerate(means) if rank != lost]
    total = np.sum(parts, axis=0) / (len(means) if reduce == "mean" else 1)
    for rank in range(len(norms)):
        write_monitor(folder, np.sqrt(np.sum(np.square(norms), axis=0)), rank=rank, more={"mean": total})


def test_a_rank_with_nan_is_named(tmp_path: Path) -> None:
    norms = ranks(tmp_path)
    norms[2][4:6, 119:] = np.nan
    norms[0][4:6, 120:] = np.nan  # the next step, after the reduction
    write_ranks(tmp_path, norms)
    trend = analysed(tmp_path)
    assert vars(trend.ranks.not_finite or trend) == {"step": 120, "ranks": [2], "name": names()[5]}
    assert "only rank 2 of 4 is not finite at step 120" in " ".join(sentences(trend))
    assert trend.anomalies.first
    assert (trend.anomalies.first.rank, trend.anomalies.first.step) == (2, 120)


@pytest.mark.parametrize(("factor", "largest"), [(1.15, True), (0.87, False)])
def test_a_rank_that_deviates_a_little_in_every_step_is_named(
    tmp_path: Path, factor: float, largest: bool
) -> None:
    norms = ranks(tmp_path)
    norms[3] *= factor
    write_ranks(tmp_path, norms)
    (found,) = analysed(tmp_path).ranks.deviating
    assert (found.rank, found.largest) == (3, largest)
    assert found.ratio == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_equal_ranks_and_a_right_reduction_are_no_finding_and_a_lost_rank_is(
    tmp_path: Path, reduce: str
) -> None:
    norms = ranks(tmp_path)
    write_ranks(tmp_path / "right", norms, reduce)
    found = analysed(tmp_path / "right").ranks
    assert (found.deviating, found.mismatched, found.not_finite) == ([], {}, None)
    assert (found.operation, found.checked, found.count) == (reduce, 14, 4)
    write_ranks(tmp_path / "wrong", norms, reduce, lost=1)
    trend = analysed(tmp_path / "wrong")
    assert len(trend.ranks.mismatched) == 14
    assert f"is not the {reduce} of the ranks in 14 of 14 tensors" in " ".join(sentences(trend))


def test_means_of_elements_that_cancel_are_rounding_and_no_finding(tmp_path: Path) -> None:
    """The gradients of a token embedding have a mean of zero: the three means are unrelated rounding."""
    generator, (one, other) = np.random.default_rng(3), ranks(tmp_path)[:2]
    norm = np.sqrt(one**2 + other**2)

    def write(folder: Path, rounding: float) -> None:
        for rank, norms in enumerate((one, other)):
            mean = rounding * generator.standard_normal(one.shape)
            more = {"mean": mean, "std": norms / 100}  # 10,000 elements
            write_monitor(folder, norms, "grad_unreduced", rank, more=more)
        mean = rounding * generator.standard_normal(one.shape)
        write_monitor(folder, norm, more={"mean": mean, "std": norm / 100})

    write(tmp_path / "cancel", 1e-9)
    found = analysed(tmp_path / "cancel").ranks
    assert (found.mismatched, found.checked) == ({}, 14)
    write(tmp_path / "wrong", 1e-4)  # RMS / sqrt(n) of norm 1
    assert len(analysed(tmp_path / "wrong").ranks.mismatched) == 14


def test_the_binomial_tail_is_that_of_counting() -> None:
    generator = np.random.default_rng(0)
    draws = generator.binomial(40, 0.25, 400_000)
    for count in (0, 10, 17, 20):
        assert binomial_tail(count, 40, 0.25) == pytest.approx(
            float((draws >= count).mean()), rel=0.1, abs=1e-4
        )


@pytest.mark.parametrize(
    ("head", "reference", "words"),
    [
        ("norm", False, "the tables have at most 20 steps, and a history needs 31"),
        ("mean", False, "no table has one of norm, std, max"),
        ("norm", True, "at most 0 steps are common to both runs"),
    ],
)
def test_what_is_not_tested_is_not_called_clean(
    tmp_path: Path, head: str, reference: bool, words: str
) -> None:
    for name, tensor, steps in (("a", "x", 20), ("b", "y", 90)):
        place = tmp_path / f"{name}/monitor/rank0"
        place.mkdir(parents=True)
        lines = [f"0,{tensor},{step},{1 + step % 3}" for step in range(steps)]
        (place / "param_0-999.csv").write_text("\n".join([f"vpp_stage,name,step,{head}", *lines]) + "\n")
    trend = analysed(tmp_path / "b", tmp_path / "a") if reference else analysed(tmp_path / "a")
    assert words in sentences(trend)[0]
