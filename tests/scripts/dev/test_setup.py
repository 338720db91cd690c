"""Test the set-up with a fake interpreter that records its calls and installs nothing."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from runtime import detected_hardware
from runtime.errors import UserError
from scripts.dev import setup

ROOT = Path(__file__).parents[3]

STUB = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in
{refusals}
esac
exit 0
"""
PYPROJECT = """
[project]
dependencies = ["numpy>=2.0,<3"]
[project.optional-dependencies]
torch = ["torch>=2.11,<2.16"]
trainer = ["kconfiglib>=14.1,<15"]
hub = ["datasets>=4.0,<6"]
wandb = ["wandb>=0.20,<1"]
tensorboard = ["tensorboard>=2.18,<3"]
dev = ["pytest>=8.3,<10"]
"""


class Machine:
    """A checkout with the fake interpreter in .venv."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls_file = root, root / "calls"
        (root / "pyproject.toml").write_text(PYPROJECT)
        self.refuse("-c import torch")

    def refuse(self, *patterns: str) -> None:
        """Make calls with this beginning fail from now on."""
        python = self.root / ".venv/bin/python"
        python.parent.mkdir(parents=True, exist_ok=True)
        refusals = "\n".join(f'  "{p}"*) echo "refused: {p}" >&2; exit 1;;' for p in patterns)
        python.write_text(STUB.format(calls=self.calls_file, refusals=refusals or "  none) ;;"))
        python.chmod(0o755)

    def configure(self, *lines: str) -> None:
        (self.root / ".config").write_text("".join(line + "\n" for line in lines))

    def calls(self) -> list[str]:
        """Return the calls since the last time, without the constant arguments of pip and uv."""
        uv = f"-m uv pip install --quiet --python {setup.python()} "
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return [
            line.replace("--quiet --disable-pip-version-check --no-compile --retries=2 ", "").replace(
                uv, "-m uv "
            )
            for line in text.splitlines()
        ]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(sys, "platform", "linux")
    see(monkeypatch, "cpu")
    machine = Machine(tmp_path)
    machine.configure("CONFIG_SEEDS=3")
    return machine


def see(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    hardware = detected_hardware.Hardware(kind, "a device", 2**34, 1, (), "")
    monkeypatch.setattr(detected_hardware, "detect_hardware", lambda: hardware)


def error_of(*arguments: str) -> str:
    """Return the message of a refusal."""
    with pytest.raises(UserError) as refused:
        setup.main([*arguments])
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- which torch ------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_cpu_build_is_installed(machine: Machine) -> None:
    setup.main(["main"])
    assert machine.calls() == [
        "-c ",
        "-m pip install uv",
        "-c import torch",
        f"-m uv {setup.TORCH_ON_CPU}",
        "-m uv numpy>=2.0,<3 kconfiglib>=14.1,<15",
    ]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("cuda", "-m pip install torch>=2.11,<2.16"),
        ("rocm", "-m uv --torch-backend auto torch>=2.11,<2.16"),
    ],
)
def test_a_gpu_gets_the_matching_torch_build(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str, wanted: str
) -> None:
    see(monkeypatch, kind)
    before_and_after = iter([False, True])  # whether a torch that fits is installed
    monkeypatch.setattr(setup, "works", lambda code: "torch" not in code or next(before_and_after))
    setup.main(["main"])
    calls = machine.calls()
    assert wanted in calls
    assert not any("+cpu" in call for call in calls)


A100 = ("CONFIG_TARGET_A100_40G=y", 'CONFIG_DETECTED="a100-40g"')


def test_a_cpu_build_is_replaced_for_the_card_of_the_configuration_and_no_other_build_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.configure(*A100)
    fits = iter([False, True])
    monkeypatch.setattr(setup, "works", lambda code: "cuda" not in code or next(fits))
    setup.main(["main"])
    assert "-m pip install --force-reinstall torch>=2.11,<2.16" in machine.calls()


@pytest.mark.parametrize(
    ("lines", "card"),
    [
        (A100, "cuda"),
        (("CONFIG_TARGET_CPU=y", "CONFIG_EXECUTOR_SLURM=y", A100[1]), ""),
        (("CONFIG_TARGET_AUTO=y", A100[1]), ""),  # this machine's card counts
        (("CONFIG_TARGET_AUTO=y", "CONFIG_EXECUTOR_SLURM=y", A100[1]), "cuda"),
        (("CONFIG_TARGET_AUTO=y", "CONFIG_EXECUTOR_RAY=y", 'CONFIG_DETECTED="cpu"'), ""),
    ],
)
def test_the_card_that_torch_is_installed_for_is_that_of_the_study(
    machine: Machine, lines: tuple[str, ...], card: str
) -> None:
    machine.configure(*lines)
    assert setup.configured_card() == card


# -- what is installed, and once --------------------------------------------------------------------------------


def test_a_second_call_does_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    setup.main(["main"])
    assert machine.calls()
    capsys.readouterr()
    setup.main(["main"])
    assert machine.calls() == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "requirement"),
    [
        ("CONFIG_WANDB=y", "wandb"),
        ("CONFIG_DATASET_FINEWEB_EDU=y", "datasets"),
        ('CONFIG_DATASET_FILES="texts/*.parquet"', "datasets"),
    ],
)
def test_an_extra_is_installed_when_the_configuration_needs_it(
    machine: Machine, line: str, requirement: str
) -> None:
    machine.configure(f"# {line}", line.replace("=y", "=n").replace("parquet", "md"))
    setup.main(["main"])
    assert not any(f" {requirement}>" in call for call in machine.calls())
    machine.configure(line)
    setup.main(["main"])
    assert any(f" {requirement}>" in call for call in machine.calls())


def test_without_a_network_one_line_says_so_and_how_the_wheels_of_the_study_are_brought(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.refuse("-m pip install", "-m uv")
    python = machine.root / ".venv/bin/python"
    retries = "\n".join(f"WARNING: Retrying (Retry(total={n}, connect=None))" for n in (1, 0))
    python.write_text(python.read_text().replace("refused: -m pip install", retries))
    for kind in ("base", "main"):
        line = error_of(kind)
        assert line.startswith("no network")
        assert f"'numpy>=2.0,<3' 'kconfiglib>=14.1,<15' '{setup.TORCH_ON_CPU}'" in line
        assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels" in line
    assert "Retry" not in capsys.readouterr().err


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["base"], ["--as-it-is", "main"]])
def test_an_old_python_is_refused_in_one_line_before_anything_else(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (machine.root / ".config").unlink()
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    monkeypatch.setattr(sys, "version", "3.9.2 (default)")
    line = error_of(*arguments)
    assert "Python 3.9.2 is too old: 3.11 or newer is needed" in line
    assert machine.calls() == []


def test_an_old_python_can_read_the_file_that_refuses_it() -> None:
    """The code before the version check must run on an older Python."""
    source = Path(setup.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 7))
    tops = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert "tomllib" not in tops
    assert "from __future__ import annotations" in source


@pytest.mark.parametrize(("kind", "goal"), [("main", ""), ("core", "admit"), ("core", "plan")])
def test_a_command_that_needs_a_config_names_the_fix_before_it_installs_anything(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str, goal: str
) -> None:
    (machine.root / ".config").unlink()
    monkeypatch.setenv("MAKE_GOALS", goal)
    assert "fix: make defconfig-gpt2-ra-ablation" in error_of(kind)
    assert machine.calls() == []


# -- PYTHON= ----------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Require three packages, and put a folder with the modules of two before the real ones."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    required = 'dependencies = ["present_one>=1", "absent_one==2", "broken_one<3"]'
    pyproject = machine.root / "pyproject.toml"
    pyproject.write_text(
        re.sub("dependencies = .*", required, PYPROJECT).replace("wandb>", "absent_tracker>")
    )
    for name in ("present_one", "absent_one", "broken_one", "absent_tracker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "present_one.py").write_text("")
    (folder / "broken_one.py").write_text("raise OSError('libsomething.so.7: cannot open')")
    return folder


def test_with_as_it_is_missing_and_broken_packages_are_named_and_none_is_installed(
    machine: Machine, modules: Path
) -> None:
    line = error_of("--as-it-is", "main")
    assert (
        f"{sys.executable} has no absent_one, broken_one (OSError: libsomething.so.7: cannot open);" in line
    )
    needed = "'absent_one==2' 'broken_one<3'"
    assert f"fix: {sys.executable} -m pip install {needed} (without internet: " in line
    assert f"python3 -m pip download {needed}, carry the .whl files here" in line
    assert machine.calls() == []
    assert not list((machine.root / ".venv").glob(".installed*"))


def test_every_package_of_the_project_has_a_module_of_the_name_that_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "ROOT", ROOT)
    monkeypatch.setattr(setup, "configured_extras", list)
    packages = [setup.package(line) for line in setup.requirements_of("dev")]
    assert {"torch", "kconfiglib", "pillow", "pytest"} <= set(packages)
    for name in packages:
        assert importlib.util.find_spec(setup.MODULES.get(name, name)), name


def test_the_extras_that_a_configuration_needs_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "ROOT", ROOT)
    monkeypatch.setattr(setup, "configured_extras", lambda: [*setup.EXTRAS])
    packages = {setup.package(line) for line in setup.requirements_of("main")}
    assert {"datasets", "pyarrow", "wandb", "tensorboard"} <= packages
