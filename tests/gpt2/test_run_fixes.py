"""CONFIG_NUMERICS_FIX in a run: on the record and in the fingerprint, resumed to the bit, refused in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gpt2.resume import RunError
from gpt2.transformer import MLP
from gpt2.watch import check_fixes
from runtime import run_record
from runtime.errors import UserError
from runtime.settings import Config
from tests import small_runs

STEPS = 6


def configured(folder: Path, words: str, dtype: str = "float32") -> Config:
    texts = small_runs.write_texts(folder / "texts")
    config = small_runs.configuration(texts, STEPS, dropout=0.1 if dtype == "float32" else 0.0)
    return dataclasses.replace(
        config, numerics_fix=words, target=dataclasses.replace(config.target, dtype=dtype)
    )


def losses(folder: Path) -> list[float]:
    return [loss for _, loss in small_runs.outcome(folder)[2]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    small_runs.start(folder / "run", configured(folder, "")).train()
    return folder


WORDS = "upcast:blocks.0.mlp.proj small:blocks.1.mlp upcast:blocks.1.attention small:loss small:adamw"


def test_a_fixed_run_differs_by_rounding_and_has_its_fixes_on_the_record(plain: Path, tmp_path: Path) -> None:
    run = small_runs.start(tmp_path / "run", configured(plain, WORDS))
    run.train()
    found, before = losses(tmp_path / "run"), losses(plain / "run")
    states = [small_runs.outcome(folder / "run")[0] for folder in (plain, tmp_path)]
    assert not small_runs.same(states[0]["model"], states[1]["model"])
    assert found == pytest.approx(before, rel=1e-5)  # with dropout: the masks are the same
    record = run_record.load(tmp_path / "run")
    assert record.fixes == (
        "blocks.0.mlp.proj (ContractLinear) in a wider format",
        "blocks.1.mlp (MLP) by small operations",
        "blocks.1.attention (CausalSelfAttention) in a wider format",
        "loss by small operations",
        "optimizer by small operations",
    )
    fingerprint, without = record.fingerprint, run_record.load(plain / "run").fingerprint
    assert fingerprint
    assert without
    assert fingerprint.numerics_fix == WORDS
    assert fingerprint.replace(numerics_fix=None) == without
    assert {one.dtype for one in run.stepper.model.parameters()} == {torch.float32}


def test_an_interrupted_run_resumes_with_its_fixes_and_not_with_others(plain: Path, tmp_path: Path) -> None:
    config = configured(plain, WORDS)
    small_runs.start(tmp_path / "whole", config).train()
    stop = small_runs.StopAfter(4)
    assert small_runs.start(tmp_path / "run", config, stop=stop).train() == "interrupted"
    for words in ("", "upcast:norm"):
        with pytest.raises(RunError, match="was started with another numerics_fix"):
            small_runs.start(tmp_path / "run", configured(plain, words)).train()
    assert small_runs.start(tmp_path / "run", config).train() == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    state, whole = (small_runs.outcome(tmp_path / name)[0] for name in ("run", "whole"))
    assert small_runs.same(state["model"], whole["model"])


def test_an_upcast_run_under_autocast_is_that_of_float32(plain: Path, tmp_path: Path) -> None:
    words = "upcast:token upcast:blocks.* upcast:norm upcast:loss"
    for name, given, dtype in (
        ("half", "", "bfloat16"),
        ("fixed", words, "bfloat16"),
        ("single", "", "float32"),
    ):
        config = dataclasses.replace(configured(plain, given, dtype))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
        small_runs.start(tmp_path / name, config).train()
    half, fixed, single = (losses(tmp_path / name) for name in ("half", "fixed", "single"))
    assert fixed == pytest.approx(single, rel=2e-6)
    assert max(abs(one - other) for one, other in zip(half, single, strict=True)) > 1e-4


def test_names_are_checked_before_a_run(plain: Path, tmp_path: Path) -> None:
    model = small_runs.start(tmp_path / "run", configured(plain, "")).stepper.model
    check_fixes(model, WORDS, "cpu")
    check_fixes(model, "cpu:loss")
    for words, device, message in (
        ("upcast:blocks.0.mpl", "cpu", "upcast:blocks.0.mpl matches no module and no function; fix: did you mean"),
        ("cpu:loss", "cpu", "cpu:loss has no effect: the runs compute on the CPU"),
        ("cpu:adamw", "cuda", "cpu:adamw matches no module"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            check_fixes(model, words, device)
    assert type(model.blocks[1].mlp) is MLP
