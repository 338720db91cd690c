"""TrainerMon in scripts with unusual tensors and loops: the script ends as without it, with rows or a line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from referee.numerics import TrainerMon
from referee.numerics.monitor import statistics
from tests.referee.numerics.monitor.table_rows import read_rows

SWITCHES = ("xy", "wg", "param", "mv", "ur", "attention")
ALL = {f"{name}_distribution": True for name in SWITCHES}
OPS = {"ops": ["norm", "mean", "nans", "inf", "zeros"], "step_count_per_record": 100}


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    return tmp_path / "out" / "rank0"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def watch(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: Any = ALL, micros: int = 1
) -> TrainerMon:
    (folder / "config.json").write_text(json.dumps({"targets": {}} | OPS | config))
    monitor = TrainerMon(folder / "config.json")
    monitor.set_monitor(model, optimizer, grad_acc_steps=micros)
    return monitor


def steps_of(output: Path, kind: str) -> list[int]:
    return sorted({row.step for row in read_rows(output, kind)})


def test_what_cannot_be_read_is_one_line_and_the_script_ends_alike(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = statistics.host_row

    def fails(part: Tensor) -> list[float]:
        if part.numel() == 16:  # 2.weight, and its gradients and moments
            raise RuntimeError("no such\nkernel")
        return original(part)

    monkeypatch.setattr(statistics, "host_row", fails)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(tmp_path, model, optimizer, {"wg_distribution": True, "param_distribution": True})
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (line,) = capsys.readouterr().out.splitlines()
    assert "step 0: 2.weight has no grad_unreduced: RuntimeError: no such; such rows are missing" in line
    assert {row.name for row in read_rows(output, "param")} == {"0.weight", "0.bias", "2.bias"}
    assert steps_of(output, "param") == [0, 1, 2]


def test_a_step_that_grad_scaler_skips_has_its_rows(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    monitor = watch(tmp_path, model, optimizer, {"wg_distribution": True, "xy_distribution": True}, micros=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(2):
            batch = torch.full((3, 4), float("inf") if step in (2, 4) else 1.0)
            scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [" step 2", " step 4"]
    assert steps_of(output, "actv") == steps_of(output, "grad_unreduced") == [0, 1, 2, 3, 4]
    assert steps_of(output, "grad_reduced") == [0, 1, 3]
    bad = {row.step for row in read_rows(output, "grad_unreduced") if row.values[2] + row.values[3] > 0}
    assert bad == {2, 4}
    counts = [sum(row.step == step for row in read_rows(output, "actv")) for step in range(5)]
    assert len(set(counts[:4])) == 1


def test_activations_of_a_compiled_model_are_read_and_change_no_bit(tmp_path: Path, output: Path) -> None:
    start = 1  # a step without hooks before it

    def trained(observed: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.compile(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 2)), backend="aot_eager"
        )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if observed:
            watch(tmp_path, model, optimizer, {"xy_distribution": True, "start_step": start})
        for _ in range(3):
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    before, after = trained(False), trained(True)
    assert all(map(torch.equal, before, after))
    assert steps_of(output, "actv") == list(range(start, 3))
    assert {"0.output.0", "3.output.0"} <= {row.name for row in read_rows(output, "actv")}
