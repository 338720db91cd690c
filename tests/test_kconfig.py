"""The Kconfig tree and `scripts.kconfig`: nothing that Kconfig's library lets through silently gets through here."""

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

from gpt2.config import load_config
from gpt2.errors import UserError
from gpt2.symbols import ConfigError, read_symbols
from scripts import kconfig, kconfig_rules
from scripts.kconfig_arguments import make_variables

BASES = sorted(path.name for path in kconfig.DEFCONFIGS.iterdir() if path.is_file())
FRAGMENTS = sorted(path.name for path in kconfig.fragments())
STUDY = "gpt2-ra-ablation"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder for .config, on a machine where only a CPU is seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def run(*arguments: str, makeflags: str = "") -> None:
    assert kconfig.main(arguments, {"MAKEFLAGS": makeflags}) == 0


def defconfig(*assignments: str, spec: str = STUDY) -> str:
    run("defconfig", spec, *assignments)
    return Path(".config").read_text()


def refusal(*arguments: str, makeflags: str = "") -> str:
    """The message of a command that fails and leaves .config and its folder alone."""
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(ConfigError) as caught:
        run(*arguments, makeflags=makeflags)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def own_defconfigs(monkeypatch, folder: Path, **files: str) -> None:
    """Defconfigs and fragments of the test's own; `target__x` is target/x."""
    (folder / "target").mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("__", "/")).write_text(text)
    monkeypatch.setattr(kconfig, "DEFCONFIGS", folder)


# ---- the tree itself


def test_every_symbol_that_users_set_says_what_it_costs_and_has_a_default():
    tree = kconfig_rules.load_kconfig("cpu")
    for symbol in tree.unique_defined_syms:
        assert any(node.help and len(node.help) > 20 for node in symbol.nodes), symbol.name
        assert symbol.choice or symbol.defaults, symbol.name
        if symbol.orig_type == tree.syms["SEEDS"].orig_type:
            assert symbol.ranges, f"{symbol.name} is an int without a range"


def test_the_tree_loads_without_a_warning_even_about_undefined_symbols(monkeypatch):
    import kconfiglib

    with kconfig_rules.kconfig_environment("cpu"):
        os.environ["KCONFIG_WARN_UNDEF"] = "y"
        tree = kconfiglib.Kconfig("Kconfig", warn_to_stderr=False)
    assert tree.warnings == []


def test_the_kernels_own_environment_does_not_leak_in(monkeypatch):
    for name, value in {
        "srctree": "/nowhere",
        "CONFIG_": "BR2_",
        "KCONFIG_CONFIG": "/nowhere/.config",
    }.items():
        monkeypatch.setenv(name, value)
    assert "CONFIG_SEEDS=3" in defconfig()
    assert os.environ["CONFIG_"] == "BR2_"


# ---- defconfigs and fragments


@pytest.mark.parametrize("detected", ["cpu", "a100-40g"])
@pytest.mark.parametrize("base", BASES)
def test_every_defconfig_and_fragment_loads_and_its_savedefconfig_gives_it_again(
    base, detected, tmp_path, monkeypatch
):
    monkeypatch.setenv("RA_DETECTED", detected)
    original = kconfig.DEFCONFIGS
    for index, spec in enumerate([base, *(f"{base}+{fragment}" for fragment in FRAGMENTS)]):
        monkeypatch.setattr(kconfig, "DEFCONFIGS", original)
        text = defconfig(spec=spec)
        assert f'CONFIG_DETECTED="{detected}"' in text
        kconfig.check()
        run("savedefconfig", "saved")
        own_defconfigs(monkeypatch, tmp_path / str(index), saved=Path("saved").read_text())
        Path(".config").unlink()
        assert defconfig(spec="saved") == text, spec


@pytest.mark.parametrize(
    ("detected", "spec", "cpu"),
    [
        ("cpu", STUDY, True),
        ("a100-40g", STUDY, False),
        ("generic-cuda", STUDY, False),
        ("cpu", f"{STUDY}+a100-40g", False),
        ("a100-40g", f"{STUDY}+cpu", True),
        ("cpu", f"{STUDY}+cpu", True),
    ],
)
def test_the_scale_follows_the_named_target_and_otherwise_what_was_detected(detected, spec, cpu, monkeypatch):
    monkeypatch.setenv("RA_DETECTED", detected)
    defconfig(spec=spec)
    config = load_config(".config")
    assert config.target.scale_cpu is cpu
    assert config.target.detected == detected
    assert config.model.size == ("mini" if cpu else "124m")
    assert config.data.dataset == ("embedded" if cpu else "fineweb-edu")
    assert config.batch.effective == (4 if cpu else 512)
    assert config.target.compile is not cpu


def test_the_effective_batch_is_the_same_on_every_gpu_target():
    batches = set()
    for fragment in set(FRAGMENTS) - {"cpu"}:
        defconfig(spec=f"{STUDY}+{fragment}")
        config = load_config(".config")
        batches.add((config.batch.effective, config.model.block_size, config.data.max_tokens))
        assert config.target.name == fragment
    assert len(batches) == 1
    assert {batch[:2] for batch in batches} == {(512, 1024)}


def test_a_config_from_an_a100_is_valid_on_a_laptop(monkeypatch):
    monkeypatch.setenv("RA_DETECTED", "a100-40g")
    text = defconfig()
    monkeypatch.setenv("RA_DETECTED", "cpu")
    assert kconfig.check().model.size == "124m"
    run("olddefconfig")
    assert Path(".config").read_text() == text


def test_two_fragments_of_one_choice_are_refused_by_both_names():
    message = refusal("defconfig", f"{STUDY}+w7900+cpu")
    assert "defconfigs/target/cpu:2: CONFIG_TARGET_CPU=y" in message
    assert "CONFIG_TARGET_W7900=y (defconfigs/target/w7900:2)" in message
    message = refusal("defconfig", f"{STUDY}+w7900", "CONFIG_TARGET_CPU=y")
    assert "command line: CONFIG_TARGET_CPU=y" in message
    assert "defconfigs/target/w7900:2" in message


def test_a_fragment_overrides_the_defconfigs_own_choice_and_the_command_line_comes_last(
    tmp_path, monkeypatch
):
    own_defconfigs(
        monkeypatch,
        tmp_path / "d",
        mine="CONFIG_TARGET_H100=y\nCONFIG_SEEDS=1\nCONFIG_EFFECTIVE_BATCH=64\n",
        target__w7900="CONFIG_TARGET_W7900=y\nCONFIG_SEEDS=2\n",
        target__more="CONFIG_EFFECTIVE_BATCH=128\n",
    )
    defconfig("CONFIG_SEEDS=7", spec="mine+w7900+more")
    symbols = read_symbols(".config")
    assert symbols.flag("TARGET_W7900")
    assert not symbols.flag("TARGET_H100")
    assert (symbols.integer("SEEDS"), symbols.integer("EFFECTIVE_BATCH")) == (7, 128)


def test_overriding_a_symbol_takes_along_what_depended_on_it():
    defconfig("CONFIG_HELLASWAG=n", spec=f"{STUDY}-smoke")
    assert "HELLASWAG_LIMIT" not in read_symbols(".config")
    defconfig("CONFIG_DATASET_FILES=books/*.txt more/**/*.md", spec=f"{STUDY}-smoke")
    config = load_config(".config")
    assert (config.data.dataset, config.data.files) == ("files", ("books/*.txt", "more/**/*.md"))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gpt2-ra-ablatoin", "did you mean gpt2-ra-ablation?"),
        (f"{STUDY}+w790", "did you mean w7900?"),
        (f"{STUDY}+a100", "did you mean a100-40g or a100-80g?"),
        ("w7900", "is a fragment"),
        (f"{STUDY}+{STUDY}-smoke", "is a whole defconfig"),
        (f"{STUDY}+cpu+cpu", "named twice"),
        ("../../etc/passwd", 'there is no defconfig "../../etc/passwd"'),
        ("target/cpu", "there is no defconfig"),
        ("", "there is no defconfig"),
        (f"{STUDY}+", "there is no fragment"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_what_does(spec, says):
    assert says in refusal("defconfig", spec)


# ---- what the library would let through silently

SILENT = [
    ("CONFIG_SEDS=5", "CONFIG_SEDS=5", "CONFIG_SEEDS"),
    ("CONFIG_SEEDS=0", "CONFIG_SEEDS=0", "1 to 1000"),
    ("CONFIG_SEEDS=1001", "CONFIG_SEEDS=1001", "1 to 1000"),
    ("CONFIG_SEEDS=-3", "CONFIG_SEEDS=-3", "1 to 1000"),
    ("CONFIG_SEEDS=0x3", "CONFIG_SEEDS=0x3", "whole number"),
    ("CONFIG_SEEDS=three", "CONFIG_SEEDS=three", "whole number"),
    ('CONFIG_SEEDS="3"', 'CONFIG_SEEDS="3"', "whole number"),
    ("CONFIG_WANDB=yes", "CONFIG_WANDB=yes", "y nor n"),
    ("CONFIG_WANDB=m", "CONFIG_WANDB=m", "y nor n"),
    ('CONFIG_WANDB_MODE="online"', 'CONFIG_WANDB_MODE="online"', "needs CONFIG_WANDB"),
    ("CONFIG_DATASET_LOCAL=y", "CONFIG_DATASET_LOCAL=y", 'needs CONFIG_DATASET_FILES != ""'),
    ("CONFIG_TARGET_AUTO=n", "CONFIG_TARGET_AUTO=n", "CONFIG_TARGET_W7900=y"),
    ('CONFIG_DETECTED="h100"', 'CONFIG_DETECTED="h100"', "cannot be set"),
    ("CONFIG_SCALE_CPU=y", "CONFIG_SCALE_CPU=y", "cannot be set"),
    ('CONFIG_LEARNING_RATE="fast"', 'CONFIG_LEARNING_RATE="fast"', "not a number"),
    ('CONFIG_LEARNING_RATE="0"', 'CONFIG_LEARNING_RATE="0"', "above 0 and at most 1"),
    ('CONFIG_LEARNING_RATE="nan"', 'CONFIG_LEARNING_RATE="nan"', "not a number"),
    ('CONFIG_ALTERNATION_INIT="1"', 'CONFIG_ALTERNATION_INIT="1"', "above 0 and below 1"),
    ("CONFIG_MICRO_BATCH=5", "CONFIG_MICRO_BATCH=5", "nearest values that work: 1, 2, 4"),
    ("CONFIG_GPT2_MAX_TIME=0", "CONFIG_GPT2_MAX_TIME=0", "no budget"),
    ('CONFIG_VARIANTS="B RALERN"', 'CONFIG_VARIANTS="B RALERN"', "RALEARN"),
    ('CONFIG_VARIANTS="B RA:3-12"', 'CONFIG_VARIANTS="B RA:3-12"', "layers 0 to 3"),
    ('CONFIG_VARIANTS=""', 'CONFIG_VARIANTS=""', "no variant"),
    ('CONFIG_STUDY_NAME="../up"', 'CONFIG_STUDY_NAME="../up"', "safe folder name"),
    ('CONFIG_RESULTS_DIR=" "', 'CONFIG_RESULTS_DIR=" "', "no folder"),
    ("CONFIG_EVAL_TOKENS=100", "CONFIG_EVAL_TOKENS=100", "CONFIG_GPT2_BLOCK_SIZE=128"),
]


@pytest.mark.parametrize(("line", "assignment", "right"), SILENT)
def test_a_defconfigs_bad_line_is_named_by_file_line_symbol_value_and_remedy(
    line, assignment, right, tmp_path, monkeypatch
):
    defconfig()
    own_defconfigs(monkeypatch, tmp_path.parent / f"{tmp_path.name}-d", mine=f"# first\n\n{line}\n")
    message = refusal("defconfig", "mine")
    assert message.startswith(f"{tmp_path.parent}/{tmp_path.name}-d/mine:3: {assignment} ")
    assert right in message


@pytest.mark.parametrize(("line", "assignment", "right"), SILENT)
def test_the_command_line_goes_through_the_same_checks(line, assignment, right):
    defconfig()
    message = refusal("defconfig", STUDY, line)
    assert message.startswith(f"command line: {assignment} ")
    assert right in message


@pytest.mark.parametrize(
    "line",
    [
        "CONFIG_SEEDS = 3",
        " CONFIG_SEEDS=3",
        "SEEDS=3",
        "CONFIG_SEEDS",
        "CONFIG_SEEDS=3 # three",
        "# CONFIG_WANDB is not set at all",
        "#CONFIG_WANDB is not set",
        'CONFIG_STUDY_NAME="unfinished',
        'CONFIG_STUDY_NAME="a" "b"',
        'CONFIG_STUDY_NAME="a\\n"',
        "CONFIG_STUDY_NAME=unquoted",
        "CONFIG_SEEDS=",
        "\ufeffCONFIG_SEEDS=3",
    ],
)
def test_a_malformed_line_is_named(line, tmp_path, monkeypatch):
    defconfig()
    own_defconfigs(monkeypatch, tmp_path.parent / f"{tmp_path.name}-d", mine=f"CONFIG_TRACKIO=y\n{line}\n")
    message = refusal("defconfig", "mine")
    assert "mine:2: " in message
    assert line.strip() in message
    assert "right:" in message


def test_a_losing_choice_member_is_refused(tmp_path, monkeypatch):
    text = "CONFIG_TARGET_H100=y\n\nCONFIG_TARGET_H200=y\n"
    own_defconfigs(monkeypatch, tmp_path / "d", mine=text)
    message = refusal_without_folder("mine")
    assert "mine:3: CONFIG_TARGET_H200=y excludes CONFIG_TARGET_H100=y (" in message
    assert "mine:1" in message


def refusal_without_folder(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run("defconfig", spec)
    assert not Path(".config").exists()
    return str(caught.value)


def test_a_symbol_set_twice_in_one_file_is_refused(tmp_path, monkeypatch):
    own_defconfigs(monkeypatch, tmp_path / "d", mine="CONFIG_SEEDS=3\nCONFIG_SEEDS=4\n")
    message = refusal_without_folder("mine")
    assert "mine:2: CONFIG_SEEDS=4 was set before, as CONFIG_SEEDS=3" in message


def test_a_failed_write_leaves_the_config_and_no_temporary_file(monkeypatch):
    text = defconfig()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run("defconfig", STUDY, "CONFIG_SEEDS=5")
    assert [path.name for path in Path().iterdir()] == [".config"]
    assert Path(".config").read_text() == text


def test_the_config_before_is_kept_if_it_was_valid_and_differs():
    first = defconfig()
    second = defconfig("CONFIG_SEEDS=5")
    assert Path(".config.old").read_text() == first
    assert defconfig("CONFIG_SEEDS=5") == second
    assert Path(".config.old").read_text() == first
    Path(".config").write_text("CONFIG_SEDS=4\n")
    assert defconfig() == first
    assert Path(".config.old").read_text() == first


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
        ("SEEDS=3", "right: CONFIG_NAME=value"),
        ("CONFIG_SEEDS", "right: CONFIG_NAME=value"),
        ("CONFIG_SEEDS=", "has no value"),
        ("CONFIG_STUDY_NAME=a\nb", "control character"),
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
def test_a_wrong_command_shows_the_right_ones(arguments):
    assert refusal(*arguments).startswith("usage: ")


def test_makes_own_variables_are_taken_and_other_ones_left_alone():
    run(
        "defconfig",
        STUDY,
        makeflags=r"s -j2 -- CONFIG_SEEDS=5 CONFIG_VARIANTS=B\ RALEARN PYTHON=python3 TARGET=w7900",
    )
    symbols = read_symbols(".config")
    assert (symbols.integer("SEEDS"), symbols.text("VARIANTS")) == (5, "B RALEARN")


@pytest.mark.parametrize("typo", ["SEEDS=5", "CONFG_SEEDS=5"])
def test_a_make_variable_that_was_meant_as_a_symbol_is_refused(typo):
    assert "did you mean CONFIG_SEEDS=5?" in refusal("defconfig", STUDY, makeflags=f" -- {typo}")


HOSTILE = "a b 'q' \"d\" \\ $(touch x) `touch y` ;touch z #& |<>*?~!"


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_what_is_typed_after_make_arrives_unchanged_whatever_it_holds(elsewhere):
    program = 'import os; open("flags", "w").write(os.environ["MAKEFLAGS"])'
    Path("Makefile").write_text(f"defconfig-%:\n\t@{sys.executable} -c '{program}'\n")
    typed = ["CONFIG_DATASET_FILES=" + HOSTILE, "CONFIG_SEEDS=4", "PYTHON=python3"]
    subprocess.run(["make", "-s", "defconfig-a+b", *typed], check=True)
    assert make_variables(Path("flags").read_text()) == dict(one.split("=", 1) for one in typed)


def test_shell_metacharacters_are_data():
    files = {path.name for path in Path().iterdir()}
    defconfig("CONFIG_DATASET_FILES=" + HOSTILE)
    kconfig.check()
    run("olddefconfig")
    run("savedefconfig", "saved")
    assert read_symbols(".config").text("DATASET_FILES") == HOSTILE
    assert {path.name for path in Path().iterdir()} - files == {".config", "saved"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20))
def test_any_text_survives_the_way_into_config_and_back(elsewhere, text):
    value = "d/" + text
    defconfig("CONFIG_DATA_DIR=" + value)
    assert read_symbols(".config").text("DATA_DIR") == value
    assert kconfig.check().data.directory == Path(value)


# ---- check and olddefconfig


def edited(old: str, new: str) -> int:
    """Edit .config by hand; the number of the line that changed."""
    lines = Path(".config").read_text().split("\n")
    (index,) = [index for index, line in enumerate(lines) if line == old]
    lines[index : index + 1] = [new] if new else []
    Path(".config").write_text("\n".join(lines))
    return index + 1


@pytest.mark.parametrize(
    ("old", "new", "right"),
    [
        ("CONFIG_SEEDS=3", "CONFIG_SEDS=3", "CONFIG_SEEDS"),
        ("CONFIG_SEEDS=3", 'CONFIG_SEEDS="3"', "whole number"),
        ("CONFIG_SEEDS=3", "CONFIG_SEEDS=0", "1 to 1000"),
        ("CONFIG_SEEDS=3", "CONFIG_SEEDS = 3", "no spaces"),
        ('CONFIG_LEARNING_RATE="1e-3"', 'CONFIG_LEARNING_RATE="2"', "at most 1"),
        ('CONFIG_LEARNING_RATE="1e-3"', "CONFIG_LEARNING_RATE=1e-3", "double quotes"),
        ("# CONFIG_TARGET_CPU is not set", "CONFIG_TARGET_CPU=y", "keep one"),
        ("CONFIG_TARGET_AUTO=y", "# CONFIG_TARGET_AUTO is not set", "leaves its choice empty"),
        ("CONFIG_MICRO_BATCH=0", "CONFIG_MICRO_BATCH=3", "nearest values that work"),
        ("# CONFIG_WANDB is not set", 'CONFIG_WANDB="y"', "y nor n"),
    ],
)
def test_a_bad_edit_by_hand_is_named_by_line_and_olddefconfig_does_not_hide_it(old, new, right):
    defconfig()
    line = edited(old, new)
    for command in ("check", "olddefconfig", "savedefconfig", "check"):
        message = refusal(command)
        assert message.startswith(f".config:{line}: ")
        assert right in message


@pytest.mark.parametrize(
    ("old", "new", "symbol"),
    [
        ("CONFIG_SEEDS=3", "", "CONFIG_SEEDS"),
        ("CONFIG_SCALE_CPU=y", "", "CONFIG_SCALE_CPU"),
        ("CONFIG_SCALE_CPU=y", "# CONFIG_SCALE_CPU is not set", "CONFIG_SCALE_CPU"),
        ('CONFIG_DETECTED="cpu"', "", "CONFIG_DETECTED"),
        ('CONFIG_DETECTED="cpu"', 'CONFIG_DETECTED="h100"', "CONFIG_TARGET_DETECTED_CPU"),
        ('CONFIG_DATASET_FILES=""', 'CONFIG_DATASET_FILES="a.txt"', "CONFIG_DATASET_EMBEDDED"),
        ("CONFIG_HELLASWAG=y", "# CONFIG_HELLASWAG is not set", "CONFIG_HELLASWAG_LIMIT"),
        ("# CONFIG_WANDB is not set", "CONFIG_WANDB=y", "CONFIG_WANDB_MODE"),
    ],
)
def test_a_config_out_of_date_is_refused_and_olddefconfig_brings_it_up_to_date(old, new, symbol, capsys):
    defconfig()
    edited(old, new)
    assert symbol in refusal("check")
    run("olddefconfig")
    assert symbol in capsys.readouterr().out
    kconfig.check()
    text = Path(".config").read_text()
    run("olddefconfig")
    assert Path(".config").read_text() == text
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "olddefconfig", "savedefconfig"])
def test_without_a_config_the_way_to_one_is_named(command):
    assert "make defconfig-gpt2-ra-ablation" in refusal(command)


def test_a_config_that_is_not_text_is_refused():
    Path(".config").write_bytes(b"CONFIG_SEEDS=3\n\xff\xfe")
    assert "not UTF-8" in refusal("check")


# ---- the other commands


def test_menuconfig_without_a_terminal_says_what_to_do_instead():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kconfig", "menuconfig"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(kconfig_rules.ROOT)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: menuconfig needs a terminal")
    assert "make olddefconfig" in done.stderr
    assert done.stderr.count("\n") == 1


class Menus:
    """Kconfig's menus, with a user who sets one symbol at each visit and saves."""

    def __init__(self, monkeypatch, *edits: tuple[str, str] | None) -> None:
        self.edits = list(edits)
        monkeypatch.setattr(kconfig, "menus_module", lambda: self)
        monkeypatch.setattr(kconfig.importlib, "reload", lambda module: module)

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
    config = kconfig.check()
    assert (config.target.name, config.model.size, config.target.detected) == ("a100-40g", "124m", "cpu")
    assert Path(".config.old").read_text() == before


def test_menuconfig_left_without_saving_changes_nothing(monkeypatch):
    text = defconfig()
    Menus(monkeypatch, None)
    run("menuconfig")
    assert Path(".config").read_text() == text
    assert not Path(".config.old").exists()


def test_menuconfig_checks_what_was_saved_and_goes_back(monkeypatch):
    defconfig()
    Menus(monkeypatch, ("LEARNING_RATE", "fast"), ("LEARNING_RATE", "2e-3"))
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    run("menuconfig")
    assert kconfig.check().optimizer.learning_rate == 2e-3


def test_menuconfig_given_up_after_a_mistake_leaves_the_config(monkeypatch):
    defconfig()
    Menus(monkeypatch, ("LEARNING_RATE", "fast"))

    def leave(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", leave)
    assert "stays as it was" in refusal("menuconfig")


def test_the_list_names_every_defconfig_and_fragment_and_needs_no_kconfiglib():
    program = (
        "import sys; sys.modules['kconfiglib'] = None; from scripts import kconfig; kconfig.main(['list'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(kconfig_rules.ROOT)},
    )
    for name in itertools.chain((f"defconfig-{base}" for base in BASES), (f"+{part}" for part in FRAGMENTS)):
        (row,) = [line for line in done.stdout.splitlines() if line.split()[0] == name]
        assert len(row.split()) > 3, f"{name} has no first comment line"


def test_configuring_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None; from scripts import kconfig; kconfig.main(sys.argv[1:], {})"
    )
    subprocess.run(
        [sys.executable, "-c", program, "defconfig", STUDY],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(kconfig_rules.ROOT)},
    )
    assert Path(".config").exists()


@pytest.mark.parametrize("command", ["olddefconfig", "savedefconfig", "menuconfig", "check"])
def test_an_assignment_that_would_be_ignored_is_refused(command: str) -> None:
    defconfig()
    before = Path(".config").read_text()
    with pytest.raises(
        UserError, match="belongs to `make defconfig-NAME CONFIG_X=v`; it changes nothing here"
    ):
        run(command, makeflags=" -- CONFIG_SEEDS=5")
    assert Path(".config").read_text() == before
    assert not Path("defconfig").exists()
