"""TrainerMon: a script is monitored by hooks, with the config.json and the files of the guide's section 4.6."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from referee.errors import NumericsError
from referee.numerics import TrainerMon
from referee.numerics.monitor.monitor_tables import table_files
from tests.referee.numerics.monitor.table_rows import read_rows

GUIDE = {
    "targets": {},
    "wg_distribution": True,
    "format": "csv",
    "ops": ["norm", "mean", "max", "min"],
    "ndigits": 16,
}


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    return tmp_path / "out" / "rank0"


def script(
    folder: Path,
    config: dict[str, Any] | None,
    steps: int = 3,
    change: Any = None,
    start: int = 0,
    micros: int = 2,
) -> list[torch.Tensor]:
    """A training script of two micro-batches a step; change(step) before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        monitor = TrainerMon(folder / "config.json", process_group=None, params_have_main_grad=False)
        monitor.set_monitor(model, optimizer, grad_acc_steps=micros, start_iteration=start)
    data = torch.randn(steps, micros, 3, 4, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        if change:
            change(step)
        for batch in data[step]:
            model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(data[0, 0])  # an evaluation is not a step
            model.train()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_configuration_of_the_guide(tmp_path: Path, output: Path) -> None:
    script(tmp_path, GUIDE)
    kinds = ("grad_unreduced", "grad_reduced", "learning_rate", "data")
    assert {path.name for path in output.iterdir()} == {
        f"{kind}_{step}-{step}.csv" for kind in kinds for step in range(3)
    }
    before, after = (read_rows(output, f"grad_{side}") for side in ("unreduced", "reduced"))
    assert {row.name for row in before} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    norms = [sum(row.values[0] ** 2 for row in table if row.step == 0) ** 0.5 for table in (before, after)]
    assert norms[1] == pytest.approx(0.05, rel=1e-3)  # clipped
    assert norms[0] > 0.05


def test_everything_changes_no_bit(tmp_path: Path, output: Path) -> None:
    switches = ("xy", "wg", "param", "mv", "ur", "attention")
    config = {f"{name}_distribution": True for name in switches} | {
        "targets": {},
        "ops": ["norm", "nans", "zeros"],
    }
    assert all(map(torch.equal, script(tmp_path, None), script(tmp_path, config)))
    assert set(table_files(output)) == {
        "actv", "actv_grad", "grad_unreduced", "grad_reduced", "param", "exp_avg", "exp_avg_sq", "update_ratio",
        "data", "learning_rate",
    }  # fmt: skip
    names = {row.name for row in read_rows(output, "actv")}
    assert {"0.input.0", "0.output.0", "2.output.0"} <= names


def test_a_resumed_script_writes_no_step_twice(tmp_path: Path, output: Path) -> None:
    config = GUIDE | {"step_count_per_record": 10}
    script(tmp_path, config, steps=5)
    with pytest.raises(NumericsError, match="has the tables of another run"):
        script(tmp_path, config)
    script(tmp_path, config, steps=3, start=3)
    steps = [row.step for row in read_rows(output, "grad_reduced")]
    assert steps == [step for step in range(6) for _ in range(4)]


def test_dynamic_monitoring_starts_and_stops_while_the_script_runs(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    path = tmp_path / "config.json"

    def change(step: int) -> None:
        changes = {2: {"dynamic_on": True, "param_distribution": True}, 5: {"dynamic_on": False}}
        if step in changes:
            path.write_text(json.dumps(GUIDE | changes[step]))
            os.utime(path, ns=(step, step))
        if step == 3:
            path.write_text("{")  # no configuration: the former stays
            os.utime(path, ns=(step, step))

    script(tmp_path, GUIDE, steps=7, change=change)
    for kind in ("param", "grad_reduced"):
        assert {row.step for row in read_rows(output, kind)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ops": ["median"]}, "statistics are"),
        ({"cc_distribution": {"enable": True}}, "cc_distribution is not supported"),
        ({"param_distributon": True}, "param_distributon"),
    ],
)
def test_a_wrong_entry_is_named_with_the_file(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GUIDE | wrong))
    with pytest.raises(NumericsError, match=message) as caught:
        TrainerMon(path)
    assert str(path) in str(caught.value)


def test_a_target_that_the_model_lacks_is_refused(tmp_path: Path, output: Path) -> None:
    for path in ("0", "0.bias", "0:1", ""):
        script(tmp_path, GUIDE | {"targets": {path: {}}}, steps=0)
    with pytest.raises(
        NumericsError, match=r"config.json: targets: 0.wieght matches no .*; fix: did you mean 0.wei"
    ):
        script(tmp_path, GUIDE | {"targets": {"0.wieght": {}}})
