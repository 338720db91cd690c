"""The size law: no part of the project grows past the limits in pyproject.toml ([tool.size]), which only go down."""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

from tests.checkout import tracked_files

ROOT = Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
ROOTS = ("scripts.study", "scripts.train", "scripts.kconfig")  # what `make` runs


def is_test(path: str) -> bool:
    return "tests" in PurePosixPath(path).parts


def module_name(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def nodes(text: str) -> int:
    """Count statements and expressions: what denser lines do not hide."""
    return sum(isinstance(node, (ast.stmt, ast.expr)) for node in ast.walk(ast.parse(text)))


def imported(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that a source imports, within functions too, with the packages that hold them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            yield from (prefix for prefix in prefixes if prefix in modules)


def closure(modules: Mapping[str, str]) -> set[str]:
    """Return every module that one of ROOTS imports, directly or not: what a reader of `make` must hold."""
    missing = [name for name in ROOTS if name not in modules]
    assert not missing, f"the roots of `make` are {ROOTS}; missing: {missing}"
    seen: set[str] = set()
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imported(modules[name], modules)
    return seen


def sizes() -> dict[str, int]:
    """Return the figures of the limits, of the files that git tracks."""
    counted = (path for path in tracked_files() if path.endswith((".py", ".js", ".css", "Kconfig")))
    texts = {path: (ROOT / path).read_text() for path in counted}

    def lines(*suffixes: str, tests: bool = False) -> int:
        chosen = (text for path, text in texts.items() if path.endswith(suffixes) and is_test(path) == tests)
        return sum(text.count("\n") for text in chosen)

    modules = {
        module_name(path): text for path, text in texts.items() if path.endswith(".py") and not is_test(path)
    }
    reached = closure(modules)
    return {
        "product": lines(".py"),
        "nodes": sum(map(nodes, modules.values())),
        "closure_lines": sum(modules[name].count("\n") for name in reached),
        "closure_files": len(reached),
        "tests": lines(".py", tests=True),
        "javascript": lines(".js"),
        "css": lines(".css"),
        "kconfig": lines("Kconfig"),
    }


def test_every_figure_is_within_its_limit() -> None:
    found = sizes()
    assert found.keys() == LIMITS.keys()
    over = {name: (size, LIMITS[name]) for name, size in found.items() if size > LIMITS[name]}
    assert not over, f"(size, limit): {over}; take something out first"


def test_the_closure_has_imports_within_functions_and_needs_its_roots() -> None:
    modules = dict.fromkeys(ROOTS, "") | {
        "a": "def f():\n    from b import c",
        "b": "",
        "b.c": "import d",
        "d": "",
    }
    modules["scripts.train"] = "import a"
    assert closure(modules) == {*ROOTS, "a", "b", "b.c", "d"}
    del modules["scripts.kconfig"]
    with pytest.raises(AssertionError, match=r"scripts\.kconfig"):
        closure(modules)


def case_collisions(paths: list[str]) -> list[str]:
    """Return files and folders that another one equals but for case: they are one on a Mac's default disk."""
    every = {str(part) for path in paths for part in (PurePosixPath(path), *PurePosixPath(path).parents)}
    folded: dict[str, str] = {}
    return sorted(name for name in every if folded.setdefault(name.lower(), name) != name)


def test_no_two_tracked_paths_differ_in_case_only() -> None:
    assert case_collisions(tracked_files()) == []
    assert len(case_collisions(["Kconfig", "kconfig/a.py"])) == 1
