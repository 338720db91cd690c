"""`make memory`: its configuration, its output and its files."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.settings import Config
from scripts import memory
from study import kconfig_commands as commands
from study.kconfig_commands import symbols_for_target
from study.planning.memory_tables import PHASES
from tests.checkout import link_project

SMALL = ("GPT2_MODEL_TINY=y", "GPT2_BLOCK_SIZE=32", "EFFECTIVE_BATCH=8", "MICRO_BATCH=4", "GRAD_CLIP=0.5")


@contextlib.contextmanager
def checkout(folder: Path) -> Iterator[None]:
    """A checkout without a .config, on a machine without a GPU, as working directory."""
    link_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RA_DETECTED", "cpu")
        patch.delenv("MAKEFLAGS", raising=False)
        yield


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    with checkout(tmp_path):
        yield tmp_path


def configure(*symbols: str) -> bytes:
    """Write .config; its bytes."""
    with contextlib.redirect_stdout(io.StringIO()):
        commands.main(["defconfig", "gpt2-ra-ablation", *(f"CONFIG_{symbol}" for symbol in symbols)])
    return Path(".config").read_bytes()


def run(*arguments: str) -> str:
    """Return the output of `make memory`."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr("sys.argv", ["scripts.memory", *arguments])
        assert memory.main() == 0
    return shown.getvalue()


# ---- configuration


def test_with_from_the_settings_of_a_configuration_are_predicted_on_the_target(empty: Path) -> None:
    before = configure(*SMALL, "TARGET_H100=y")
    symbols, source = symbols_for_target("w7900", ".config")
    config = Config.from_symbols(symbols)
    assert source == ".config with target w7900"
    assert (config.target.name, config.target.detected) == ("w7900", "w7900")
    assert (config.model.size, config.model.block_size) == ("tiny", 32)
    assert (config.batch.effective, config.batch.micro, config.optimizer.grad_clip) == (8, 4, 0.5)
    assert Path(".config").read_bytes() == before
    assert not Path(".config.old").exists()


@pytest.mark.parametrize(
    ("configured", "arguments", "message"),
    [
        (True, ["--target", "a100"], r'there is no fragment "a100"; fix: did you mean a100-40g or a100-80g'),
        (
            True,
            ["--from", ".config"],
            r"FROM=\.config needs a target; fix: make memory FROM=\.config TARGET=",
        ),
        (True, ["--target", "cpu", "--variants", "RALERN"], r"RALERN is not a variant.*RALEARN"),
        (False, ["--variants", "B"], r"there is no \.config; fix: make memory TARGET=a100-40g"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(
    empty: Path, configured: bool, arguments: list[str], message: str
) -> None:
    if configured:
        configure(*SMALL)
    with pytest.raises(UserError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
    assert not Path("results").exists()


# ---- output


def test_on_this_machine_every_phase_has_a_predicted_and_a_measured_peak(empty: Path) -> None:
    before = configure(*SMALL, "CPU_THREADS=1")
    shown = run("--variants", "B")
    assert shown.splitlines()[0] == "configuration: .config"
    assert Path(".config").read_bytes() == before
    found = json.loads(Path("results/memory/cpu.json").read_text())["variants"]
    assert list(found) == ["B"]
    assert found["B"]["measured"]["allocated"] == found["B"]["by_phase"]
    for phase in PHASES:
        assert re.search(rf"^B +{phase} .*\+0\.0%", shown, re.MULTILINE)
    assert shown.index("Predicted and measured") < shown.index("largest micro")
    assert re.search(r"^B +(forward|backward|optimizer) .* MiB", shown, re.MULTILINE)  # kinds at the peak
