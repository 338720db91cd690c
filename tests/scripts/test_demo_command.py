"""`make demo` runs its study without .config, explains each verdict and continues where it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ra.arms import control_arms
from runtime.dotconfig import parse_lines
from scripts import demo
from study import kconfig_commands as commands
from study.report import report_summary as summary
from study.study import Study
from tests.checkout import link_project
from tests.faults.in_process import InProcessExecutor

pytestmark = pytest.mark.slow
SMALLER = """
CONFIG_VARIANTS="B NOPE"
CONFIG_SEEDS=3
CONFIG_GPT2_MAX_ITERS=2
CONFIG_EVAL_TOKENS=256
CONFIG_DATASET_MAX_TOKENS=20000
"""


def arms() -> list[str]:
    (layer,) = commands.read_layers("demo")
    return layer["VARIANTS"].value.split()


def test_every_judged_arm_of_the_demo_is_explained() -> None:
    assert set(arms()) - set(control_arms(arms())) == set(demo.ARMS)
    assert set(arms()) == summary.DEMO_ARMS


def test_the_demo_runs_explains_its_verdicts_and_leaves_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    (tmp_path / ".config").write_text("# not a configuration\n")
    layers = [*commands.read_layers("demo"), parse_lines(SMALLER, "smaller")]
    monkeypatch.setattr(demo, "read_layers", lambda name: layers)
    monkeypatch.setattr(summary, "DEMO_ARMS", {"B", "NOPE"})
    monkeypatch.setattr(Study, "executor", lambda study: InProcessExecutor())
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "- NOPE (no position embedding): " in printed
    assert "Next: a study of your own: make defconfig-gpt2-ra-ablation, then make." in " ".join(
        printed.split()
    )
    assert "menuconfig" not in printed  # there is no .config of the demo
    assert str(Path("results/demo/report.html")) in printed
    assert (tmp_path / "results/demo/report.html").exists()
    assert (tmp_path / ".config").read_text() == "# not a configuration\n"

    records = {path: path.read_bytes() for path in (tmp_path / "results/demo/runs").glob("*/run.json")}
    assert len(records) == 6
    assert demo.main() == 0
    assert "- NOPE (no position embedding): " in capsys.readouterr().out
    assert {path: path.read_bytes() for path in records} == records
