"""The bench of the head: every way gives one loss, and the peaks are those of what each way holds."""

import json
import sys
from pathlib import Path

import pytest
import torch

from gpt2.config.config import VOCABULARY, TargetConfig
from gpt2.system.errors import UserError
from scripts import bench_head as bench

ROWS = 64


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of next to no width, and results elsewhere."""
    monkeypatch.setattr(bench, "WIDTH", 8)
    monkeypatch.setattr(bench, "HEADS", 1)
    monkeypatch.setattr(
        "gpt2.config.config.ANY_TARGET", TargetConfig("cpu", "float32", False, 1, "cpu", False)
    )
    monkeypatch.setattr(bench, "OUT", tmp_path / "bench-head.json")
    monkeypatch.setattr("gpt2.hardware.attention_kernels.cpu_threads", lambda _: torch.get_num_threads())


@pytest.mark.usefixtures("narrow")
def test_every_way_gives_one_loss_and_full_logits_take_the_memory_that_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpt2.model.loss.CHUNK_ROWS", {"cpu": 8})
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "2", "--shape", str(ROWS)])
    assert bench.main() == 0
    found = json.loads(bench.OUT.read_text())["ways"]
    expected = [bench.OURS, bench.FULL]
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        expected += ["torch", "torch, 8 rows"]
    assert list(found) == expected
    assert [row["loss"] for row in found.values()] == pytest.approx(
        [found["full"]["loss"]] * len(found), rel=1e-5
    )
    logits = ROWS * VOCABULARY * 4
    assert found["full"]["peak_bytes"] >= 2 * logits  # their gradient beside them
    assert found["ours"]["peak_bytes"] < logits
    assert found["full"]["speed"]["median"] == 1.0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in found)


@pytest.mark.usefixtures("narrow")
def test_a_way_that_fails_is_left_out_and_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.ways

    def broken(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on this device\nadvice")

    monkeypatch.setattr(bench, "ways", lambda device: {**real(device), "torch": broken})
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--shape", "4"])
    assert bench.main() == 0
    assert "left out: torch: not on this device" in capsys.readouterr().out
    assert "torch" not in json.loads(bench.OUT.read_text())["ways"]
    monkeypatch.setattr(bench, "ways", lambda device: {**real(device), bench.OURS: broken})
    with pytest.raises(RuntimeError, match="not on this device"):
        bench.main()


@pytest.mark.parametrize("rows", ["wide", "0"])
def test_what_is_no_number_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--shape", rows])
    with pytest.raises(UserError, match=f"'{rows}'; right: a number of rows"):
        bench.main()
