"""What a user types after `make` reaches the commands unchanged, and no shell interprets it."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.errors import UserError
from study.make_arguments import (
    command_arguments,
    make_variables,
    refuse_unknown_variables,
    split_paths,
    variables_by_target,
)

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
# Target -> the variables that its command reads.
VARIABLES = {target: tuple(names) for target, names in variables_by_target(MAKEFILE).items()}
VARIABLES["memory"] += ("CONFIG_STUDY_NAME",)
VARIABLES["defconfig-x"] = ("CONFIG_STUDY_NAME", "CONFIG_DATASET_FILES")
VARIABLES["all"] = ("CONFIG_SEEDS",)
HOSTILE = "a b 'q' \"d\" \\ \\\\ $x $$y $(shell touch made) $(touch made) `touch made`;touch made #& |<>*?~!\t{a,b} é"
# Records how it was started, in place of the interpreter.
RECORDER = f"""#!{Path(sys.executable).resolve()} -S
import json, os, sys
names = ("MAKEFLAGS", "DEFCONFIG", "PYTHONDONTWRITEBYTECODE")
with open("calls", "a") as file:
    seen = dict(argv=sys.argv, **{{name: os.environ.get(name) for name in names}})
    seen["exported"] = sorted(name for name in os.environ if name in {sorted(sum(VARIABLES.values(), ()))!r})
    file.write(json.dumps(seen) + "\\n")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder with $spaces")
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "it's a $python").write_text(RECORDER)
    (folder / "it's a $python").chmod(0o755)
    return folder


def calls(checkout: Path, *typed: str, python: str = "./it's a $python") -> list[dict[str, Any]]:
    """Run make with a recorder as interpreter. Returns its calls; no other file may appear."""
    before = sorted(path.name for path in checkout.iterdir())
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["make", f"PYTHON={python}", *typed], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    found = [json.loads(line) for line in (checkout / "calls").read_text().splitlines()]
    (checkout / "calls").unlink()
    assert sorted(path.name for path in checkout.iterdir()) == before
    return found


@functools.cache
def started_without_variables(checkout: Path, target: str) -> list[str]:
    return list(calls(checkout, target)[-1]["argv"])


def check_unchanged(checkout: Path, target: str, value: str) -> None:
    found = calls(checkout, target, *(f"{name}={value}" for name in VARIABLES[target]))[-1]
    assert found["argv"] == started_without_variables(checkout, target)
    assert found["exported"] == []
    given = make_variables(found["MAKEFLAGS"])
    assert {name: given[name] for name in VARIABLES[target]} == dict.fromkeys(VARIABLES[target], value)


@pytest.mark.parametrize("target", ["all", "compare", "defconfig-x", "memory", "sample"])
def test_a_hostile_value_of_every_variable_arrives_unchanged_and_runs_nothing(
    checkout: Path, target: str
) -> None:
    check_unchanged(checkout, target, HOSTILE)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), min_size=1, max_size=20))
@example("a\nb")
@example("--x -- y=z")
@example("\\")
def test_any_value_arrives_unchanged(checkout: Path, value: str) -> None:
    check_unchanged(checkout, "compare", "x" + value)  # make removes blanks at the start of a value


@pytest.mark.parametrize("name", ["a'b;c", "$x$(touch made)$(shell touch made)", "`touch made`"])
def test_a_hostile_name_of_a_defconfig_arrives_unchanged_and_runs_nothing(checkout: Path, name: str) -> None:
    found = calls(checkout, f"defconfig-{name}")[-1]
    assert (found["argv"][1:], found["DEFCONFIG"]) == (["-m", "scripts.kconfig", "defconfig"], name)


def test_an_interpreter_that_does_not_exist_is_named_in_one_line(checkout: Path) -> None:
    call = ["make", "--silent", "PYTHON=python-4 -X dev", "report"]
    done = subprocess.run(call, cwd=checkout, capture_output=True, text=True)
    assert done.stderr.startswith("error: PYTHON=python-4 -X dev is not a command; fix: make ")
    assert "not found" not in done.stderr


def test_no_recipe_expands_anything_but_the_interpreter_and_the_kind_of_setup() -> None:
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t")]
    assert len(recipes) > 15
    for recipe in recipes:
        left = re.sub(r"^\t@\$\((INTERPRETER|BARE|SETUP)\)", "", recipe)
        assert "$" not in left or left == " $*", recipe


ALWAYS_READ = {  # function -> the variables that it reads
    "study_directory": {"STUDY"},
    "run_arguments": {"RUN"},
}
READERS = ("command_arguments", "make_variables().get", "run_arguments")


def variables_of(module: Path) -> set[str]:
    """The variables that a command's file names in calls of the functions that read them."""
    tree, found = ast.parse(module.read_text(encoding="utf-8")), set[str]()
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        found |= ALWAYS_READ.get(name, set())
        if isinstance(call, ast.Call) and name in READERS:
            given = [constants.get(getattr(one, "id", ""), one) for one in call.args]
            for part in (*given, *(keyword.value for keyword in call.keywords)):
                found |= {
                    one.value
                    for one in ast.walk(part)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
    return found


def test_the_makefile_lists_for_each_target_the_variables_that_its_command_reads() -> None:
    for target, recipe in re.findall(r"^([\w-]+):.*\n\t@\$\(\w+\) -m (\S+)", MAKEFILE, re.MULTILINE):
        path = ROOT / recipe.replace(".", "/")
        module = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
        listed = set(variables_by_target(MAKEFILE).get(target, []))
        exported = set(re.findall(rf"^{target}: export \w+ = \$\(value (\w+)\)", MAKEFILE, re.MULTILINE))
        read = variables_of(module) if recipe.startswith(("scripts.", "bench.")) else set()
        if target != "clean":  # its file is that of mrproper, too
            assert listed == {name for name in read | exported if name.isupper()}, target


def test_the_commands_read_the_variables_of_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts.x"])
    monkeypatch.setenv(
        "MAKEFLAGS", r"s -j2 --jobserver-auth=3,4 -- OUT=a\ $$b STUDIES=c\ 'd\ e'\ -f STUDY=-x\ y FACTOR:=2"
    )
    monkeypatch.chdir(tmp_path)
    assert command_arguments(("OUT", "TEXT"), paths="STUDIES") == ["--out=a $b", "--", "c", "d e", "-f"]
    assert command_arguments(path="STUDY") == ["--", "-x y"]
    assert command_arguments(path="FACTOR") == ["--", "2"]
    assert command_arguments(("TEXT",), paths="RUN") == []
    monkeypatch.setattr(sys, "argv", ["scripts.x", "results/a"])
    assert command_arguments(("OUT",), paths="STUDIES") == ["results/a"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a", "b", "a b", "it's", "r[1]", "r1", "home/c", "\\"):
        (tmp_path / name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("", []),
        ("a b", ["a b"]),
        ("'a b' b", ["a b", "b"]),
        ("it's absent", ["it's", "absent"]),
        ("r[1] a", ["r[1]", "a"]),
        ("r* a", ["r1", "r[1]", "a"]),
        ("\\ a", ["\\", "a"]),
        ("absent a", ["absent", "a"]),
        ("absent/*", ["absent/*"]),
        ("x" * 5000, ["x" * 5000]),
    ],
)
@pytest.mark.usefixtures("folders")
def test_a_list_of_folders_is_split_as_a_shell_does_and_existing_names_need_no_quotes(
    text: str, paths: list[str]
) -> None:
    assert split_paths(text) == paths


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("PROMT=x", "command line: no command reads PROMT=x; fix: did you mean PROMPT=x?"),
        ("QQQQ=3", "fix: make help lists the commands with their variables"),
    ],
)
def test_a_variable_that_no_command_reads_is_refused_with_the_nearest_name(typed: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        refuse_unknown_variables(f" -- RUN=x {typed}")
    refuse_unknown_variables(" -- RUN=x PROMPT=y PYTHON=z CONFIG_SEEDS=3 SHELL=/bin/sh")


READS_NONE = "make {0} does not read RUN=x; fix: leave it out; make {0} reads no variable"


@pytest.mark.parametrize(
    ("target", "typed", "says"),
    [
        ("sample", "PROMT=x", "no command reads PROMT=x; fix: did you mean PROMPT=x?"),
        ("report", "RUN=x", "make report does not read RUN=x; fix: leave it out; make report reads STUDY FORMAT"),
        ("menuconfig", "RUN=x", READS_NONE.format("menuconfig")),
    ],
)  # fmt: skip
def test_every_command_refuses_a_wrong_variable_before_it_does_anything(
    target: str, typed: str, says: str
) -> None:
    before = (ROOT / ".config").read_bytes() if (ROOT / ".config").exists() else None
    done = subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", target, typed],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == f"error: command line: {says}"
    assert before == ((ROOT / ".config").read_bytes() if (ROOT / ".config").exists() else None)


def test_a_symbol_is_refused_where_a_command_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts.x"])
    monkeypatch.setenv("MAKEFLAGS", " -- RUN=x CONFIG_SEEDS=3")
    with pytest.raises(UserError, match="CONFIG_X=v on the command line has no effect here"):
        command_arguments(paths="RUN")
    assert command_arguments(paths="RUN", symbols=True) == ["--", "x"]
