"""`make monitor`: state, tables and triggers of a run; targets switched on and off."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from referee.numerics.monitor.targets import read_control
from runtime import run_record
from runtime.dotconfig import ConfigError
from runtime.errors import UserError
from runtime.settings import MonitorSettings
from scripts import monitor as command
from tests import small_runs
from tests.checkout import link_project
from tests.kconfig_commands import run as configure

DEFAULT = MonitorSettings(True, 10, ("grad", "param", "grad:nosuch"), ("nan",))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    directory = tmp_path_factory.mktemp("study") / "runs/B0"
    config = dataclasses.replace(small_runs.configuration(texts, 12), monitor=DEFAULT)
    small_runs.start(directory, config).train()
    entry = {"step": 11, "trigger": "nan", "reason": "loss nan", "checkpoint": "anomaly/00000010"}
    (directory / "monitor/triggers.jsonl").write_text(json.dumps(entry) + "\n")
    return directory


def monitor(monkeypatch: pytest.MonkeyPatch, run: Path, symbols: str = "MONITOR=y", **given: Any) -> int:
    configure("defconfig", "gpt2-ra-ablation-smoke+cpu", f"CONFIG_{symbols}")
    if run.is_dir():
        (run / "config").write_text(Path(".config").read_text())
    monkeypatch.setattr(
        "sys.argv", ["scripts.monitor", f"--run={run}", *(f"--{k}={v}" for k, v in given.items())]
    )
    return command.main()


def test_state_tables_and_triggers_are_printed(
    trained: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link_project(elsewhere)
    assert monitor(monkeypatch, trained) == 0
    printed = capsys.readouterr().out
    assert "B0: finished, last saved at step 12\n" in printed
    assert "every 10 steps: grad param; every step: nothing\n" in printed
    assert "monitor: grad:nosuch matches no trained parameter of the model" in printed
    assert "rank 0: param: 28 tensors, 2 steps from 1 to 11\n" in printed
    assert "step 11: nan: loss nan; checkpoint kept in anomaly/00000010\n" in printed
    assert f"make record RUN={trained} STEP=11" in printed
    with pytest.raises(UserError, match="B0 is finished, so ON= changes nothing; fix: leave it out"):
        monitor(monkeypatch, trained, on="grad:blocks.1")
    assert not (trained / "monitor/control.json").exists()
    run_record.write(trained, run_record.load(trained).replace(status="interrupted"))
    assert monitor(monkeypatch, trained, on="grad:blocks.1 actv") == 0
    assert "every step: grad:blocks.1, actv" in capsys.readouterr().out
    assert monitor(monkeypatch, trained, off="actv") == 0
    assert list(map(str, read_control(trained / "monitor"))) == ["grad:blocks.1"]
    for wrong, message in (
        ({"on": "weights"}, "unknown kind 'weights'"),
        ({"off": "adam"}, "adam is not switched on"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            monitor(monkeypatch, trained, **wrong)
    with pytest.raises(UserError, match="is not a folder"):
        monitor(monkeypatch, elsewhere / "B9")
    (trained / "monitor").rename(trained / "aside")
    with pytest.raises(UserError, match="trained without CONFIG_MONITOR=y"):
        monitor(monkeypatch, trained, "MONITOR=n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MONITOR_TARGETS=weights", "CONFIG_MONITOR_TARGETS.*unknown kind"),
        ("MONITOR_TRIGGERS=spike:x", "CONFIG_MONITOR_TRIGGERS.*no number above 0"),
    ],
)
def test_a_wrong_setting_is_named(elsewhere: Path, text: str, message: str) -> None:
    link_project(elsewhere)
    with pytest.raises(ConfigError, match=message):
        configure("defconfig", "gpt2-ra-ablation-smoke+cpu", "CONFIG_MONITOR=y", f"CONFIG_{text}")
