"""The structure of the packages: layers, no import circle, small folders, one class a name, modules without torch."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each room may import from itself and from the rooms below it.
FLOORS = (
    "referee.errors",
    "referee.pages",
    "referee.verdict",
    "referee.numerics",
    "referee.admission",
    "referee",
    "runtime",
    "gpt2",
    "ra",
    "grpo",
    "study",
    "bench",
    "scripts",
)
MOST_FILES = 30  # of a folder, without __init__.py
LEAVES = {
    "transformer.py": {"gpt2.cpu_linear", "gpt2.loss"},
    "loss.py": {"gpt2.cpu_linear"},
    "cpu_linear.py": set(),
    "initial_weights.py": {"gpt2.transformer"},
    "clocks.py": set(),
    "optimizer.py": set(),
}
NO_TORCH = (
    "study.kconfig_commands",
    "runtime.settings",
    "referee.pages.html_page",
    "scripts.report",
    "scripts.compare",
    "scripts.verify",
    "referee.verdict.statistics",
    "study.runs",
    "study.analysis.verdict",
    "study.report.report_data",
    "study.report.report_page",
    "study.compare.compared_studies",
    "study.grpo_page",
    "referee.numerics.setup.compared_checklists",
)


@functools.cache
def imported(text: str) -> frozenset[str]:
    """Every module, and every name in one, that a source imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def sources() -> dict[str, str]:
    """Module name -> source text, of every floor."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for folder in sorted({name.split(".")[0] for name in FLOORS})
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def edges(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of this project that it imports."""
    return {
        name: {other for other in imported(text) if other in files} - {name} for name, text in files.items()
    }


def upward(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Imports that point up."""

    def level(name: str) -> int:
        parts = name.split(".")
        return FLOORS.index(next(room for room in (".".join(parts[:2]), parts[0]) if room in FLOORS))

    return [
        f"{name} imports {other}"
        for name, others in arrows.items()
        for other in others
        if level(other) > level(name) and other != "referee"  # the package itself has no code
    ]


def folders(arrows: Mapping[str, Iterable[str]], files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return folder -> the folders it imports from. A file directly in a room counts as a folder."""

    def room(name: str) -> str:
        depth = 3 if name.startswith("referee.") else 2
        return name if name.count(".") < depth else name.rsplit(".", 1)[0]

    found: dict[str, set[str]] = {}
    for name, others in arrows.items():
        if name in files:
            found.setdefault(room(name), set()).update(room(other) for other in others)
    return {name: others - {name} for name, others in found.items()}


def circle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """One import circle, as the names on it; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows.get(name, ())):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := walk(name, []))), [])


def crowded(files: Iterable[str]) -> dict[str, int]:
    """Folders with more than MOST_FILES source files."""
    packages = {name for name in files if any(other.startswith(f"{name}.") for other in files)}
    count = Counter(name.rsplit(".", 1)[0] for name in files if name not in packages)
    return {folder: number for folder, number in count.items() if number > MOST_FILES}


def test_imports_point_down_the_floors() -> None:
    assert upward(edges(sources())) == []


def test_no_circle_among_files() -> None:
    assert circle(edges(sources())) == []


def test_no_circle_among_folders() -> None:
    files = sources()
    assert circle(folders(edges(files), files)) == []


def test_a_folder_has_at_most_thirty_files() -> None:
    assert crowded(sources()) == {}


def test_an_upward_import_a_circle_and_a_crowded_folder_are_detected() -> None:
    files = sources()
    lowest, highest = "referee.errors", "scripts.study"
    mutated = edges(files | {lowest: f"from {highest} import main\n"})
    assert upward(mutated) == [f"{lowest} imports {highest}"]
    assert circle(mutated)
    within = edges(files | {"referee.pages.markup": "from referee.verdict.looks import look_test\n"})
    assert upward(within) == ["referee.pages.markup imports referee.verdict.looks"]
    loop = {"a.x.one": {"a.y.two"}, "a.y.two": set(), "a.y.three": {"a.x.four"}, "a.x.four": set()}
    assert circle(loop) == []
    assert circle(folders(loop, dict.fromkeys(loop, ""))) == ["a.x", "a.y", "a.x"]
    assert crowded([f"a.file{number}" for number in range(31)]) == {"a": 31}
    with pytest.raises(AssertionError, match="relative"):
        imported("from . import sideways")


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_torch_and_the_standard_library_only(name: str) -> None:
    for module in imported((ROOT / "gpt2" / name).read_text()):
        top = module.split(".")[0]
        known = top == "torch" or top in sys.stdlib_module_names
        assert known or any(module.startswith(leaf) for leaf in LEAVES[name]), f"{name} imports {module}"


def loading_torch(modules: Iterable[str]) -> str:
    """Import modules in one process. Returns the first one with which torch is loaded."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name)\n"
        "        break\n"
    )
    command = [sys.executable, "-c", code, *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_reporting_comparing_and_configuring_load_no_torch() -> None:
    assert loading_torch(NO_TORCH) == ""
    assert loading_torch(["referee.pages.html_page", "gpt2.loss"]) == "gpt2.loss"


def classes(files: Mapping[str, str]) -> Counter[str]:
    """Count the module-level classes by name; those whose name begins with an underscore are a module's own."""
    trees = [ast.parse(text) for text in files.values()]
    found = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return Counter(name for name in found if not name.startswith("_"))


def test_one_name_is_one_class() -> None:
    """A name has one meaning in the whole project."""
    assert {name: count for name, count in classes(sources()).items() if count > 1} == {}


def test_a_second_class_of_a_name_is_found() -> None:
    twice = {"a.py": "class Row: ...\nclass _Own: ...", "b.py": "class Row: ...\nclass _Own: ..."}
    assert classes(twice) == {"Row": 2}
