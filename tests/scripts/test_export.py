"""Commands export the variables of the card before they import torch, and check the fused kernels before they train."""

from pathlib import Path
from typing import Any

import pytest

from bench import case_step
from bench.cases import SHAPES
from runtime import attention_kernels, resolved_target
from runtime.dotconfig import read_symbols
from runtime.gpu_specs import AOTRITON, TargetError
from scripts.dev import control
from study import kconfig_commands as commands
from study.planning import memory_tables as peaks
from tests.checkout import link_project

(SWITCH,) = AOTRITON
SMALL = ("GPT2_MODEL_TINY=y", "GPT2_BLOCK_SIZE=16", "EFFECTIVE_BATCH=2", "EVAL_TOKENS=16", "HELLASWAG=n")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a .config for the detected card and without exported variables."""
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.delenv(SWITCH)  # and restore the variables after the test
    monkeypatch.setenv("RA_DETECTED", "cpu")
    commands.main(["defconfig", "gpt2-ra-ablation-smoke", *(f"CONFIG_{line}" for line in SMALL)])
    return tmp_path


@pytest.mark.parametrize("command", ["control", "bench", "memory"])
def test_the_fused_kernels_are_checked_before_the_first_step(
    command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def check(resolved: resolved_target.ResolvedTarget, *call: Any) -> resolved_target.ResolvedTarget:
        asked.append(call)
        raise TargetError("no fused attention kernel")

    monkeypatch.setattr(attention_kernels, "check_attention", check)
    tiny = (2, 32, 16, 0.0)  # heads, their size, sequence, dropout
    small = SHAPES["cpu"][0]
    calls: dict[str, Any] = {
        "control": (control.main, tiny),
        "memory": (lambda: peaks.measure_variant(read_symbols(".config"), "B", 1, workplace), tiny),
        "bench": (
            lambda: case_step.time_case(small, "B", 1, 0.0),
            (small.heads, small.width // small.heads, small.block_size, 0.0),
        ),
    }
    call, right = calls[command]
    with pytest.raises(TargetError, match="no fused attention kernel"):
        call()
    assert asked == [right]
