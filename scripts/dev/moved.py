"""Compare the functions of two commits: did a move change any of them?

    python -m scripts.dev.moved BASE [HEAD]     HEAD: HEAD where it is not given

Prints each function, and each other statement of a module or class, that one commit has and the other has not. Where
the two multisets of digests are equal, code moved between files and nothing else changed. A digest covers the syntax
tree: docstrings, comments, layout and imports do not count, nor does the name of a module of that commit, also within
a string, nor the depth of a file. Tests are left out. Exit status 1 where they differ.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from runtime.errors import UserError, run_command

IMPORTS = (ast.Import, ast.ImportFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOTTED = re.compile(r"\w+(?:[./]\w+)+")  # a module or a path


def source_files(commit: str) -> dict[str, str]:
    """Return path -> text of the tracked Python files of a commit that are no tests. UserError for no commit."""
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True)
    if listed.returncode:
        raise UserError(f"{commit!r} is no commit of this repository; fix: give one, such as HEAD~1")
    paths = [path for path in listed.stdout.splitlines() if path.endswith(".py")]
    names = [path for path in paths if not path.startswith("tests/")]
    return {
        path: subprocess.run(
            ["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True
        ).stdout
        for path in names
    }


def statements(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, statement): functions, methods, and what else a module or class holds; no imports, docstrings."""
    for position, statement in enumerate(body):
        if isinstance(statement, IMPORTS) or (position == 0 and _is_docstring(statement)):
            continue
        if isinstance(statement, ast.ClassDef):
            header = ast.ClassDef(
                statement.name, statement.bases, statement.keywords, [], statement.decorator_list
            )
            yield f"{owner}{statement.name}", header
            yield from statements(statement.body, f"{owner}{statement.name}.")
        elif isinstance(statement, FUNCTIONS):
            yield f"{owner}{statement.name}", statement
        else:
            yield f"{owner}{ast.unparse(statement).splitlines()[0][:60]}", statement


class WithoutPlaces(ast.NodeTransformer):
    """Take the names of modules out of a syntax tree. modules: of the commit; paths have dots for their slashes."""

    def __init__(self, tree: ast.Module, modules: set[str]) -> None:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = [(f"{node.module}.{alias.name}", alias) for node in imports for alias in node.names]
        self.aliases = {alias.asname or alias.name for name, alias in names if name in modules}
        self.modules = modules

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.aliases:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            node.slice = ast.Constant(0)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = DOTTED.sub(self._without_module, node.value) if isinstance(node.value, str) else node.value
        return ast.Constant(value)

    def _without_module(self, found: re.Match[str]) -> str:
        parts = found[0].replace("/", ".").removesuffix(".py").split(".")
        lengths = range(len(parts), 1, -1)
        known = next((length for length in lengths if ".".join(parts[:length]) in self.modules), 0)
        return ".".join(["module", *parts[known:]]) if known else found[0]


def digest(statement: ast.stmt) -> str:
    """Return a SHA-256 of the syntax tree of a statement, without docstrings and imports."""
    for node in ast.walk(statement):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = body[1:] if isinstance(node, FUNCTIONS) and body and _is_docstring(body[0]) else body
            node.body = [part for part in kept if not isinstance(part, IMPORTS)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(statement).encode()).hexdigest()


def digests(files: dict[str, str]) -> tuple[Counter[str], dict[str, str]]:
    """Return the multiset of digests, and for each digest where it stands: "path: name"."""
    count: Counter[str] = Counter()
    places: dict[str, str] = {}
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in files}
    for path, text in files.items():
        tree = ast.parse(text)
        places_out = WithoutPlaces(tree, modules)
        for name, statement in statements(tree.body):
            key = digest(places_out.visit(statement))
            count[key] += 1
            places[key] = f"{path}: {name}"
    return count, places


def differences(base: dict[str, str], head: dict[str, str]) -> list[str]:
    """Return a line for each statement that one side has more often than the other."""
    (before, old), (after, new) = digests(base), digests(head)
    gone = sorted(f"- {old[key]}" for key in (before - after).elements())
    added = sorted(f"+ {new[key]}" for key in (after - before).elements())
    return gone + added


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        raise UserError("give the commit before the move; fix: python -m scripts.dev.moved BASE [HEAD]")
    base, head = source_files(sys.argv[1]), source_files(sys.argv[2] if len(sys.argv) == 3 else "HEAD")
    lines = differences(base, head)
    print("\n".join(lines) or f"the same functions in both: {sum(digests(head)[0].values())}")
    return 1 if lines else 0


if __name__ == "__main__":
    run_command(main)
