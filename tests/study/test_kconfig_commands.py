"""Test the commands of `scripts.kconfig`: input arrives unchanged, and errors name their place."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from study import kconfig_commands as commands
from study import kconfig_rules as rules
from study.make_arguments import make_variables
from tests.kconfig_commands import BASES, FRAGMENTS, STUDY, defconfig, refusal, run

pytestmark = pytest.mark.usefixtures("elsewhere")


# ---- the command line


def test_text_needs_no_inner_quotes_on_the_command_line():
    defconfig("CONFIG_VARIANTS=B RALEARN", 'CONFIG_STUDY_NAME="quoted"', "CONFIG_LEARNING_RATE=3e-4")
    symbols = read_symbols(".config")
    assert [symbols.text(name) for name in ("VARIANTS", "STUDY_NAME", "LEARNING_RATE")] == [
        "B RALEARN",
        "quoted",
        "3e-4",
    ]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("SEEDS=3", "fix: CONFIG_NAME=value"),
        ("CONFIG_SEEDS", "fix: CONFIG_NAME=value"),
        ("CONFIG_SEEDS=", "has no value"),
        ("CONFIG_STUDY_NAME=a\nb", "control character"),
        ("CONFIG_DATASET_FILES=a\rb", "control character"),
        ("CONFIG_DATASET_FILES=a\x85b", "control character"),
        ("CONFIG_DATASET_FILES=a\u2028b", "control character"),
        ("CONFIG_DATASET_FILES=a\udcffb", "control character"),
        ("CONFIG_DATASET_FILES=y", "takes file globs"),
    ],
)
def test_a_malformed_argument_is_refused(argument, says):
    message = refusal("defconfig", STUDY, argument)
    assert message.startswith("command line: ")
    assert says in message


def test_an_argument_given_twice_is_refused():
    assert "given twice" in refusal("defconfig", STUDY, "CONFIG_SEEDS=3", "CONFIG_SEEDS=4")


@pytest.mark.parametrize(
    "arguments", [(), ("defconfig",), ("defconfig", "CONFIG_SEEDS=3"), ("make",), ("check", "x")]
)
def test_an_unknown_command_lists_the_commands(arguments):
    assert refusal(*arguments).startswith("usage: ")


def test_variables_of_make_are_not_assignments():
    run(
        "defconfig",
        STUDY,
        makeflags=r"s -j2 -- CONFIG_SEEDS=5 CONFIG_VARIANTS=B\ RALEARN PYTHON=python3 TARGET=w7900",
    )
    symbols = read_symbols(".config")
    assert (symbols.integer("SEEDS"), symbols.text("VARIANTS")) == (5, "B RALEARN")


@pytest.mark.parametrize("typo", ["SEEDS=5", "CONFG_SEEDS=5"])
def test_a_make_variable_named_like_a_symbol_is_refused(typo):
    assert "did you mean CONFIG_SEEDS=5?" in refusal("defconfig", STUDY, makeflags=f" -- {typo}")


def test_the_written_config_is_named_with_its_study(capsys):
    run("defconfig", "gpt2-ra-ablation-smoke+cpu", "CONFIG_STUDY_NAME=mine")
    assert "wrote .config for the study mine, from gpt2-ra-ablation-smoke+cpu\n" in capsys.readouterr().out


def test_a_comma_between_variants_is_refused_with_the_right_list():
    message = refusal("defconfig", STUDY, "CONFIG_VARIANTS=B,RAALL,RA:1-2,3")
    assert 'did you mean "B RAALL RA:1-2,3"?' in message


HOSTILE = "a b 'q' \"d\" \\ $(touch x) `touch y` ;touch z #& |<>*?~!"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_any_value_typed_after_make_arrives_unchanged(elsewhere):
    program = 'import os; open("flags", "w").write(os.environ["MAKEFLAGS"])'
    Path("Makefile").write_text(f"defconfig-%:\n\t@\"{sys.executable}\" -c '{program}'\n")
    typed = ["CONFIG_DATASET_FILES=" + HOSTILE, "CONFIG_SEEDS=4", "PYTHON=python3"]
    subprocess.run(["make", "-s", "defconfig-a+b", *typed], check=True)
    assert make_variables(Path("flags").read_text()) == dict(one.split("=", 1) for one in typed)


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\v", "\f"])
def test_no_value_of_make_writes_a_second_setting(end: str) -> None:
    value = f'a"{end}CONFIG_SEEDS=9{end}#'
    assert make_variables(f" -- CONFIG_STUDY_NAME={value}") == {"CONFIG_STUDY_NAME": value}
    assert "control character" in refusal("defconfig", STUDY, makeflags=f" -- CONFIG_STUDY_NAME={value}")


def test_shell_metacharacters_are_not_executed():
    files = {path.name for path in Path().iterdir()}
    defconfig("CONFIG_DATASET_FILES=" + HOSTILE)
    commands.check()
    run("olddefconfig")
    run("savedefconfig", "saved")
    assert read_symbols(".config").text("DATASET_FILES") == HOSTILE
    assert {path.name for path in Path().iterdir()} - files == {".config", "saved"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20))
def test_any_text_is_read_back_from_config_unchanged(elsewhere, text):
    value = "d/" + text
    defconfig("CONFIG_DATA_DIR=" + value)
    assert read_symbols(".config").text("DATA_DIR") == value
    assert commands.check().data.directory == Path(value)


# ---- check and olddefconfig


def edited(old: str, new: str) -> int:
    """Edit a line of .config and return its number."""
    lines = Path(".config").read_text().split("\n")
    (index,) = [index for index, line in enumerate(lines) if line == old]
    lines[index : index + 1] = [new] if new else []
    Path(".config").write_text("\n".join(lines))
    return index + 1


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ("CONFIG_SEEDS=5", "CONFIG_SEDS=3", "CONFIG_SEEDS"),
        ("CONFIG_SEEDS=5", 'CONFIG_SEEDS="3"', "whole number"),
        ("CONFIG_SEEDS=5", "CONFIG_SEEDS=0", "1 to 1000"),
        ("CONFIG_SEEDS=5", "CONFIG_SEEDS = 3", "no spaces"),
        ('CONFIG_LEARNING_RATE="1.2e-3"', 'CONFIG_LEARNING_RATE="2"', "(0, 1]"),
        ('CONFIG_LEARNING_RATE="1.2e-3"', "CONFIG_LEARNING_RATE=1e-3", "double quotes"),
        ("# CONFIG_TARGET_CPU is not set", "CONFIG_TARGET_CPU=y", "fix: remove one"),
        (
            "CONFIG_TARGET_AUTO=y",
            "# CONFIG_TARGET_AUTO is not set",
            "deselects the only selected member of its choice",
        ),
        ("CONFIG_MICRO_BATCH=0", "CONFIG_MICRO_BATCH=3", "fix: use 1, 2, 4"),
        ("# CONFIG_WANDB is not set", 'CONFIG_WANDB="y"', "y nor n"),
    ],
)
def test_an_invalid_manual_edit_is_named_by_line_also_by_olddefconfig(old, new, right):
    defconfig()
    line = edited(old, new)
    for command in ("check", "olddefconfig", "savedefconfig", "check"):
        message = refusal(command)
        assert message.startswith(f".config:{line}: ")
        assert right in message


@pytest.mark.parametrize(
    ("old", "new", "symbol"),
    [
        ("CONFIG_SEEDS=5", "", "CONFIG_SEEDS"),
        ("CONFIG_SCALE_CPU=y", "", "CONFIG_SCALE_CPU"),
        ("CONFIG_SCALE_CPU=y", "# CONFIG_SCALE_CPU is not set", "CONFIG_SCALE_CPU"),
        ('CONFIG_DETECTED="cpu"', "", "CONFIG_DETECTED"),
        ('CONFIG_DETECTED="cpu"', 'CONFIG_DETECTED="h100"', "CONFIG_RESIDUAL_BF16"),
        ('CONFIG_DATASET_FILES=""', 'CONFIG_DATASET_FILES="a.txt"', "CONFIG_DATASET_EMBEDDED"),
        ("# CONFIG_HELLASWAG is not set", "CONFIG_HELLASWAG=y", "CONFIG_HELLASWAG_FILE"),
        ("# CONFIG_WANDB is not set", "CONFIG_WANDB=y", "CONFIG_WANDB_MODE"),
    ],
)
def test_an_outdated_config_is_refused_and_olddefconfig_updates_it(old, new, symbol, capsys):
    defconfig()
    edited(old, new)
    outdated = Path(".config").read_text()
    assert symbol in refusal("check")
    run("olddefconfig")
    shown = capsys.readouterr().out
    assert symbol in shown
    assert shown.endswith("wrote .config; the previous one is .config.old\n")
    assert Path(".config.old").read_text() == outdated
    commands.check()
    text = Path(".config").read_text()
    run("olddefconfig")
    assert Path(".config").read_text() == text
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "olddefconfig", "savedefconfig"])
def test_without_a_config_the_command_that_writes_one_is_named(command):
    assert "make defconfig-gpt2-ra-ablation" in refusal(command)


def test_a_config_that_is_not_text_is_refused():
    Path(".config").write_bytes(b"CONFIG_SEEDS=3\n\xff\xfe")
    assert "not UTF-8" in refusal("check")


# ---- the other commands


def test_menuconfig_without_a_terminal_names_the_alternative():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kconfig", "menuconfig"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(rules.ROOT)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: menuconfig needs a terminal")
    assert "make olddefconfig" in done.stderr
    assert done.stderr.count("\n") == 1


class Menus:
    """Simulate Kconfig's menus: the user sets one symbol at each visit and saves."""

    def __init__(self, monkeypatch, *edits: tuple[str, str] | None) -> None:
        self.edits = list(edits)
        monkeypatch.setattr(commands, "menus_module", lambda: self)
        monkeypatch.setattr(commands.importlib, "reload", lambda module: module)

    def menuconfig(self, tree) -> None:
        path = os.environ["KCONFIG_CONFIG"]
        tree.load_config(path)
        edit = self.edits.pop(0)
        if edit:
            tree.syms[edit[0]].set_value(edit[1])
            tree.write_config(path)


def test_menuconfig_follows_the_target_and_saves_a_valid_config(monkeypatch):
    before = defconfig()
    Menus(monkeypatch, ("TARGET_A100_40G", "y"))
    run("menuconfig")
    config = commands.check()
    assert (config.target.name, config.model.size, config.target.detected) == ("a100-40g", "124m", "cpu")
    assert Path(".config.old").read_text() == before


def test_menuconfig_closed_without_saving_changes_nothing(monkeypatch):
    text = defconfig()
    Menus(monkeypatch, None)
    run("menuconfig")
    assert Path(".config").read_text() == text
    assert not Path(".config.old").exists()


def test_menuconfig_reopens_on_an_invalid_value(monkeypatch):
    defconfig()
    Menus(monkeypatch, ("LEARNING_RATE", "fast"), ("LEARNING_RATE", "3e-3"))
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    run("menuconfig")
    assert commands.check().optimizer.learning_rate == 3e-3


def test_menuconfig_closed_after_an_invalid_value_leaves_the_config_unchanged(monkeypatch):
    defconfig()
    Menus(monkeypatch, ("LEARNING_RATE", "fast"))

    def leave(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", leave)
    assert "unchanged" in refusal("menuconfig")


def test_the_list_names_every_defconfig_and_fragment_and_needs_no_kconfiglib():
    program = "import sys; sys.modules['kconfiglib'] = None; from scripts.dev import help; help.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=rules.ROOT,
    )
    for name in itertools.chain((f"defconfig-{base}" for base in BASES), (f"+{part}" for part in FRAGMENTS)):
        (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [name]]
        assert len(row.split()) > 3, f"{name} has no first comment line"


def test_configuring_needs_kconfiglib_and_msgspec_alone():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('numpy', 'scipy', 'torch', 'tiktoken')));"
        "from scripts import kconfig; kconfig.main(sys.argv[1:], {})"
    )
    subprocess.run(
        [sys.executable, "-c", program, "defconfig", STUDY],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(rules.ROOT)},
    )
    assert Path(".config").exists()


@pytest.mark.parametrize("command", ["olddefconfig", "savedefconfig", "menuconfig", "check"])
def test_an_assignment_without_effect_is_refused(command: str) -> None:
    defconfig()
    before = Path(".config").read_text()
    with pytest.raises(UserError, match="no effect here; fix: make defconfig-NAME CONFIG_X=v"):
        run(command, makeflags=" -- CONFIG_SEEDS=5")
    assert Path(".config").read_text() == before
    assert not Path("defconfig").exists()
