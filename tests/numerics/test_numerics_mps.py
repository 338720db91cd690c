"""Use numerics on a device without float64: the stand-in for Apple's mps, whose numbers are the CPU's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compilers import NO_COMPILER

ROOT = Path(__file__).parents[2]
pytestmark = NO_COMPILER
SCRIPT = """
import csv, json, sys
from pathlib import Path

import torch
from torch import nn

from numerics import PrecisionDebugger, seed_all
from numerics.checklist.pack import machine
from numerics.checklist.structure import random_states
from numerics.describe import to_float64
from numerics.fixes.conversion import UPCAST, Conversion
from numerics.logp.diff import as_matrix
from numerics.monitor.monitor import Monitor, MonitorConfig
from numerics.monitor.reduction.device import fused
from numerics.oracle.check import check_operation
from numerics.stress.station import device_kind

folder = Path(sys.argv[1])
late = seed_all(11, mode=True)
states = random_states()
torch.mps.manual_seed(12)

def train(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 8).to(device)
    recorder = PrecisionDebugger(dump_path=str(folder / device), task="statistics", level="mix")
    recorder.start(model)
    model(x).square().mean().backward()
    recorder.stop()
    recorder.step()
    watch = Monitor(model, optimizer, MonitorConfig(("all",), interval=1), folder / device / "monitor")
    for step in (1, 2):
        with watch.step(step):
            model(x).square().mean().backward()
            watch.gradients("grad_reduced")
            with watch.update():
                optimizer.step()
            optimizer.zero_grad()
    return {
        "monitor": {p.name: [*csv.DictReader(p.open())] for p in sorted((folder / device / "monitor").rglob("*.csv"))},
        "record": json.loads((folder / device / "step0/rank0/dump.json").read_text())["data"],
    }

checks = {
    device: check_operation(torch.nn.functional.gelu, (torch.linspace(-3, 3, 64),), device=device)
    for device in ("mps", "cpu")
}
x = torch.linspace(1, 2, 7).to("mps")
conversion = Conversion.of(UPCAST, [x])
wide = conversion.into(x)
back, = conversion.back([wide.exp()], [torch.float32])
print(json.dumps({"states": [states, random_states()], "machine": machine()["device"], "late": late,
                  "wide": [str(wide.dtype), wide.device.type, back.device.type, str(back.dtype)],
                  "sum": [to_float64(x).sum().item(), to_float64(x).device.type, as_matrix(x[None], "x").tolist()],
                  "kind": device_kind("mps"), "float64": fused("mps", torch.float32),
                  "mps": train("mps"), "cpu": train("cpu"),
                  "checks": {device: [[check.direction, check.measured.max_ulps] for check in every]
                             for device, every in checks.items()}}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT / "tests/fixtures/mps"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "11"}
    folder = tmp_path_factory.mktemp("mps")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_the_generator_of_the_device_is_seeded_and_listed(found: dict[str, Any]) -> None:
    first, second = (states["state of device 0"] for states in found["states"])
    assert first != second
    assert found["machine"] == "1 x Apple M4"
    assert found["kind"].startswith("Apple M4, torch ")
    assert found["late"] == []


def test_float64_is_computed_on_the_cpu(found: dict[str, Any]) -> None:
    total, device, rows = found["sum"]
    assert (total, device) == (pytest.approx(10.5), "cpu")
    assert rows[0][-1] == 2
    assert found["wide"] == ["torch.float64", "cpu", "mps", "torch.float32"]


def test_a_monitored_training_has_the_statistics_of_the_cpu(found: dict[str, Any]) -> None:
    assert not found["float64"]  # so statistics are computed in float32 on the device
    assert found["mps"]["monitor"].keys() == found["cpu"]["monitor"].keys()
    for name, rows in found["mps"]["monitor"].items():
        for row, exact in zip(rows, found["cpu"]["monitor"][name], strict=True):
            assert row.pop("name") == exact.pop("name")
            numbers = [[float(value or 0) for value in one.values()] for one in (row, exact)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-7), (name, row, exact)


def test_a_recorded_step_has_the_calls_and_numbers_of_the_cpu(found: dict[str, Any]) -> None:
    assert "Functional.layer_norm.0.forward" in found["mps"]["record"]
    assert found["mps"]["record"] == found["cpu"]["record"]


def test_the_oracle_checks_an_operation_on_the_device(found: dict[str, Any]) -> None:
    assert {direction for direction, _ in found["checks"]["mps"]} == {"forward", "backward"}
    assert found["checks"]["mps"] == found["checks"]["cpu"]
