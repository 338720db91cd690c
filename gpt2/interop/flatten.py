"""Copy modules into one flat folder: each becomes a file, and its imports of other copied modules become relative.

transformers loads a model's code that way: it copies the modelling file and the files that it imports relatively, from
one folder. Module a.b.c becomes a_b_c.py. Code is parsed, not run. Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpt2.system.errors import UserError

Source = Callable[
    [str], str | None
]  # name of a module -> its text; None for a module that is not to be copied


class FlattenError(UserError, ValueError):
    """An import cannot be made relative."""


@dataclass(frozen=True)
class _Edit:
    """Lines first .. last (from 0) become `text`; needs: the modules that it imports."""

    first: int
    last: int
    text: str
    needs: tuple[str, ...]


def flat_name(module: str) -> str:
    """Return the name of a copied module: a.b.c becomes a_b_c."""
    return module.replace(".", "_")


def flatten(entry: str, source: Source, instead: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return module -> text with relative imports, for `entry` and every module that it needs.

    instead: module -> module that is imported in its place. An import under `if TYPE_CHECKING:` is removed.
    FlattenError names the line of an import that has no relative form, and a syntax error.
    """
    found: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        text = source(module)
        if text is None:
            raise FlattenError(f"{module} has no source file; fix: remove its import")
        lines = text.split("\n")
        for edit in reversed(_edits(module, text, source, instead or {})):
            lines[edit.first : edit.last + 1] = edit.text.split("\n")
            waiting += edit.needs
        found[module] = "\n".join(lines)
    return found


def _edits(module: str, text: str, source: Source, instead: Mapping[str, str]) -> list[_Edit]:
    """Return the changes of a module's imports, in the order of its lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise FlattenError(f"{module} cannot be parsed: {error}; fix: correct the file") from None
    lines = text.split("\n")
    unused = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    edits = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom) or not _targets(node, module, source):
            continue
        assert node.end_lineno
        before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1]
        if before.strip() or after[node.end_col_offset :].split("#")[0].strip():
            raise _refusal(module, node, "shares its line with another statement", "write it on its own line")
        if id(node) in unused:
            edits.append(_Edit(node.lineno - 1, node.end_lineno - 1, f"{before}pass", ()))
            continue
        statements, needs = _relative(node, module, source, instead)
        shown = "\n".join(before + line for line in statements) + after[node.end_col_offset :]
        edits.append(_Edit(node.lineno - 1, node.end_lineno - 1, shown, tuple(needs)))
    return sorted(edits, key=lambda edit: edit.first)


def _targets(node: ast.Import | ast.ImportFrom, module: str, source: Source) -> list[str]:
    """Return the copied modules that a statement names."""
    if isinstance(node, ast.ImportFrom):
        base = _absolute(node, module)
        names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
    else:
        names = [alias.name for alias in node.names]
    return [name for name in names if source(name) is not None]


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _relative(
    node: ast.Import | ast.ImportFrom, module: str, source: Source, instead: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the statements that replace an import, and the modules that they need."""
    statements, needs, values = [], [], []
    if isinstance(node, ast.Import):
        for alias in node.names:
            if source(alias.name) is None:
                statements.append(f"import {ast.unparse(alias)}")
            elif alias.asname is None:
                fix = f"from {alias.name} import the names that are used"
                raise _refusal(module, node, f"`import {alias.name}` has no relative form", fix)
            else:
                needs.append(instead.get(alias.name, alias.name))
                statements += _module_import(needs[-1], alias.asname)
        return statements, needs
    base = _absolute(node, module)
    for alias in node.names:
        if alias.name == "*":
            raise _refusal(module, node, "`import *` hides what is used", "name what is imported")
        inner = f"{base}.{alias.name}"
        if source(inner) is not None:
            needs.append(instead.get(inner, inner))
            statements += _module_import(needs[-1], alias.asname or alias.name)
        else:
            values.append(ast.unparse(alias))
    if values:
        needs.append(instead.get(base, base))
        line = f"from .{flat_name(needs[-1])} import {', '.join(values)}"
        if len(line) > 110:
            line = f"from .{flat_name(needs[-1])} import (\n    " + ",\n    ".join(values) + ",\n)"
        statements += line.split("\n")
    return statements, needs


def _module_import(module: str, name: str) -> list[str]:
    """Return statements that bind a flat module. transformers copies what `from .<module> import` names, only."""
    flat = flat_name(module)
    hidden = re.sub(r"\W", "_", f"_{flat}_name")
    return [f"from .{flat} import __name__ as {hidden}", f"{name} = __import__('sys').modules[{hidden}]"]


def _refusal(module: str, node: ast.stmt, problem: str, fix: str) -> FlattenError:
    return FlattenError(f"{module}, line {node.lineno}: the import {problem}; fix: {fix}")
