"""The bench of products: every part at a width, ratios within rounds, and what is written."""

import json
import sys
from pathlib import Path

import pytest

from gpt2.errors import UserError
from scripts import bench_products


def test_the_command_measures_one_width_and_writes_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_products, "OUT", tmp_path / "bench-products.json")
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "2", "--shape", "8"])
    assert bench_products.main() == 0
    rows = json.loads((tmp_path / "bench-products.json").read_text())["rows"]
    assert [(row["width"], row["part"]) for row in rows] == [(8, part) for part in bench_products.PARTS]
    printed = capsys.readouterr().out
    for row in rows:
        assert row["ratio"]["least"] <= row["ratio"]["median"] <= row["ratio"]["most"]
        assert f"{row['ratio']['median']:.2f} [" in printed


def test_a_torch_without_onednn_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_products, "export_environment", lambda: None)
    monkeypatch.setattr("gpt2.linear.offered", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(UserError, match="no oneDNN product"):
        bench_products.main()
