"""The rows of docs/memory.md on the 2025 study: all logits at once, and two T x T score matrices a head and layer."""

import dataclasses
import re
from pathlib import Path

import pytest

from gpt2 import predicted_memory
from gpt2.predicted_memory import predict
from gpt2.transformer import ModelParts
from ra.variants import variant
from runtime import resolved_target
from runtime.settings import Config
from study.kconfig_commands import symbols_for_target
from study.planning.micro_batch import Predictions
from tests.ra.naive import NaiveAttention, naive_loss

DOCUMENT = Path(__file__).parents[3] / "docs/memory.md"
GIB = 2**30


@pytest.mark.parametrize("name", ["B", "RALEARN"])
def test_the_documented_peaks_of_the_2025_study_are_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols, _ = symbols_for_target("a100-40g", makeflags="")
    config = Config.from_symbols(symbols)
    model, alternation = config.model, config.alternation
    chosen = variant(name, model, alternation)
    work = Predictions(config, resolved_target.resolve(config.target, planning=True)).work_at(chosen, 32)

    def naive(layer: int) -> NaiveAttention:
        return NaiveAttention(
            model.width,
            model.heads,
            model.dropout,
            initial_probability=alternation.initial_probability,
            learning_rate_multiplier=alternation.learning_rate_multiplier,
        )

    parts = ModelParts(attention=naive) if name == "RALEARN" else chosen.parts
    monkeypatch.setattr(predicted_memory, "linear_cross_entropy", lambda *given, rows: naive_loss(*given))
    peak = predict(dataclasses.replace(work, parts=parts)).peak_bytes
    documented = re.search(
        rf"^\| {name} as in the 2025 report \| ([\d.]+) GiB", DOCUMENT.read_text(), re.MULTILINE
    )
    assert documented
    assert f"{peak / GIB:.2f}" == documented[1]
