"""The bytes of tests/pins/memory.tsv are predicted: equal with the torch that the table names, else within 1 %."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
import torch

from ra.variants import variant
from runtime import resolved_target
from runtime.settings import Config
from study.kconfig_commands import symbols_for_target
from study.planning.memory_tables import PHASES
from study.planning.micro_batch import Predictions

TORCH = "2.13."
TOLERANCE = 0 if torch.__version__.startswith(TORCH) else 0.01
with (Path(__file__).parents[2] / "pins/memory.tsv").open(newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t"))
STUDIES = [
    pytest.param(target, settings, list(rows), id=f"{target}, torch {TORCH if not TOLERANCE else 'other'}")
    for (target, settings), rows in itertools.groupby(ROWS, lambda row: (row["target"], row["settings"]))
]


@pytest.mark.parametrize(("target", "settings", "rows"), STUDIES)
def test_the_predicted_bytes_of_a_study_are_those_of_the_table(
    target: str, settings: str, rows: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "get_num_threads", lambda: 1
    )  # the CPU's attention has buffers for each thread
    symbols, _ = symbols_for_target(target, makeflags=f" -- {settings}")
    config = Config.from_symbols(symbols)
    variants = [variant(row["variant"], config.model, config.alternation) for row in rows]
    predictions = Predictions(config, resolved_target.resolve(config.target, planning=True))
    micro = predictions.choose_batch(variants).micro
    for row, each in zip(rows, variants, strict=True):
        found = predictions.of(each, micro)
        now = {"micro": micro, "peak": found.peak_bytes} | found.timeline.by_phase()
        pinned = {name: int(row[name]) for name in ("micro", "peak", *PHASES)}
        assert now == pytest.approx(pinned, rel=TOLERANCE, abs=0), each.name
