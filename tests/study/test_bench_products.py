"""The bench of products: every part at a width, ratios within rounds, and what is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2.system.errors import UserError
from scripts import bench_products
from study.runner.child_process import KEEP_HEAP


def test_the_command_measures_one_width_and_writes_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_products, "OUT", tmp_path / "bench-products.json")
    monkeypatch.setattr("gpt2.hardware.attention_kernels.cpu_threads", lambda _: torch.get_num_threads())
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
    monkeypatch.setattr("gpt2.model.cpu_linear.offered", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(UserError, match="no oneDNN product"):
        bench_products.main()


def test_a_shape_that_is_no_width_is_an_error_that_says_what_would_be_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--shape", "wide"])
    with pytest.raises(UserError, match="'wide'; right: a width"):
        bench_products.main()


def test_a_bench_in_its_own_process_has_the_heap_of_training() -> None:
    code = "import os; from study.runner.child_process import keep_heap; keep_heap();"
    code += "print(os.environ['GLIBC_TUNABLES'])"
    for given, kept in (({}, KEEP_HEAP), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"},) * 2):
        clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
        done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True)
        assert done.stdout.strip() == (kept if isinstance(kept, str) else kept["GLIBC_TUNABLES"])
