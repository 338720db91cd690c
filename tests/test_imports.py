"""Arrows point one way: gpt2 <- ra <- study <- scripts; leaves know nothing; reports need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "gpt2": {"gpt2"},
    "ra": {"gpt2", "ra"},
    "study": {"gpt2", "ra", "study"},
    "scripts": {"gpt2", "ra", "study", "scripts"},
}
LEAVES = {
    "model.py": {"gpt2.again", "gpt2.linear", "gpt2.loss"},
    "loss.py": {"gpt2.linear"},
    "linear.py": set(),
    "again.py": set(),
    "clock.py": set(),
    "optim.py": set(),
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {name.split(".")[0] for name in imported(path)} & ALLOWED.keys()
        assert ours <= ALLOWED[package], f"{path.name} imports {ours - ALLOWED[package]}"


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_torch_and_the_standard_library_only(name: str) -> None:
    for module in imported(ROOT / "gpt2" / name):
        top = module.split(".")[0]
        known = top == "torch" or top in sys.stdlib_module_names
        assert known or any(module.startswith(leaf) for leaf in LEAVES[name]), f"{name} imports {module}"


def test_the_record_needs_the_standard_library_only() -> None:
    tops = {module.split(".")[0] for module in imported(ROOT / "gpt2" / "record.py")}
    assert tops - {"gpt2"} <= set(sys.stdlib_module_names)
    ours = {module for module in imported(ROOT / "gpt2" / "record.py") if module.startswith("gpt2")}
    assert ours == {"gpt2.errors", "gpt2.errors.UserError"}


@pytest.mark.parametrize(
    "module",
    ["study.report", "study.render", "study.statistics", "scripts.report", "scripts.kconfig", "gpt2.config"],
)
def test_reporting_and_configuring_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
