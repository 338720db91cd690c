"""A flat folder has the modules that an entry needs, with relative imports that Python resolves to the same objects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.interop.flatten import FlattenError, flat_name, flatten

ROOT = Path(__file__).parents[3]


def flat(
    files: dict[str, str], entry: str = "p.main", instead: dict[str, str] | None = None
) -> dict[str, str]:
    return flatten(entry, files.get, instead)


def value_of(files: dict[str, str], folder: Path, entry: str = "p.main", name: str = "VALUE") -> str:
    """Write the flat modules as a package and print a name of the entry in another process."""
    package = folder / "flat"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for module, text in flat(files, entry).items():
        (package / f"{flat_name(module)}.py").write_text(text)
    code = f"from flat.{flat_name(entry)} import {name}; print({name})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


BASE = {"p.one": "X = 1\nY = 2\n", "p.two": "from p.one import X\nZ = X + 10\n"}


@pytest.mark.parametrize(
    "text",
    [
        "from p.two import Z\nVALUE = Z",
        "from p.two import Z as other\nVALUE = other",
        "import p.two as module\nVALUE = module.Z",
        "from p import two\nVALUE = two.Z",
        "from p import two as other\nVALUE = other.Z",
        "from . import two\nVALUE = two.Z",
        "from .two import Z\nVALUE = Z",
        "from .two import (\n    Z,  # a comment\n)\nVALUE = Z",
        "def late():\n    from p.two import Z\n    return Z\nVALUE = late()",
        "import json, p.two as t\nVALUE = json.loads(str(t.Z))",
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from p.absent import A\n    from p.one import Y\nfrom p.two import Z\nVALUE = Z",
    ],
)
def test_every_form_of_import_gives_the_same_value_in_a_flat_folder(text: str, tmp_path: Path) -> None:
    assert value_of({**BASE, "p.main": text}, tmp_path) == "11"


def test_only_what_is_needed_is_copied_and_each_file_but_its_imports_is_unchanged() -> None:
    files = {
        **BASE,
        "p.main": "import torch\nfrom p.two import Z\n\nVALUE = Z  # kept\n",
        "p.other": "W = 0\n",
    }
    found = flat(files)
    assert set(found) == {"p.main", "p.two", "p.one"}
    assert found["p.main"] == "import torch\nfrom .p_two import Z\n\nVALUE = Z  # kept\n"
    assert found["p.one"] == files["p.one"]


def test_another_module_is_imported_in_place_of_one() -> None:
    files = {**BASE, "p.main": "from p.two import X\n"}
    found = flat(files, instead={"p.two": "p.one"})
    assert set(found) == {"p.main", "p.one"}
    assert found["p.main"] == "from .p_one import X\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "import p.one\nVALUE = p.one.X",
            r"p\.main, line 1: the import `import p\.one` has no relative form; fix: from",
        ),
        ("from p.one import *", r"line 1: the import `import \*` hides"),
        ("VALUE = 1; from p.one import X", "line 1: the import shares its line"),
        ("def f(:\n", r"p\.main cannot be parsed"),
    ],
)
def test_what_has_no_relative_form_is_one_line_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(FlattenError, match=problem) as caught:
        flat({**BASE, "p.main": text})
    assert "\n" not in str(caught.value)
    assert "; fix: " in str(caught.value)


MODULES = [
    "gpt2.model.transformer",
    "gpt2.model.sampling",
    "ra.attention",
    "ra.settings",
    "study.export.export",
]


@given(entry=st.sampled_from(MODULES))
@settings(max_examples=10, deadline=None)
def test_the_copies_of_this_project_import_nothing_of_it_absolutely(entry: str) -> None:
    def source(module: str) -> str | None:
        path = ROOT.joinpath(*module.split("."))
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file.read_text() for file in files if file.is_file()), None)

    found = flatten(entry, source)
    flat_names = {flat_name(module) for module in found}
    for text in found.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in flat_names
            elif isinstance(node, ast.ImportFrom):
                assert source(node.module or "") is None
            elif isinstance(node, ast.Import):
                assert all(source(alias.name) is None for alias in node.names)
