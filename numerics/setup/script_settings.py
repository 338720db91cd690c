"""Read settings from training scripts and configuration files.

Shell: `--name value`, `name=value`. Python: constants, defaults of argparse, arguments of classes. JSON, TOML and YAML:
leaves by dotted path. All names of a side form one table, because scripts of two machines have different names.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from numerics.setup.secrets import REMOVED, is_secret

ALIASES = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "bsz": "batch_size"}


def script_settings(name: str, text: str) -> dict[str, set[str]]:
    """Return setting -> values of one file. A file that cannot be parsed gives none: its text is compared."""
    try:
        match name.rpartition(".")[2].lower():
            case "json":
                pairs = list(leaves(json.loads(text)))
            case "toml":
                pairs = list(leaves(tomllib.loads(text)))
            case "yaml" | "yml":
                pairs = list(_yaml(text))
            case "py":
                pairs = list(_python(ast.parse(text)))
            case _:
                pairs = list(_shell(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    found: dict[str, set[str]] = {}
    for key, value in pairs:
        add_setting(found, key, value)
    return found


def add_setting(found: dict[str, set[str]], name: str, value: Any) -> None:
    """Add a setting under its normal name: lower case with underscores, abbreviations as the long name."""
    text = normal_value(value)
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name.strip().lstrip("-+"))
    head, dot, last = key.lower().replace("-", "_").rpartition(".")
    secret = is_secret(name, text)
    found.setdefault(f"{head}{dot}{ALIASES.get(last, last)}", set()).add(REMOVED if secret else text)


def normal_value(value: Any) -> str:
    """Return one text for equal values: 1e-3 and 0.001, true and True, a list and a tuple."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value.strip())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(normal_value, value))}]"
    text = str(value).strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    if text.lower() in ("true", "false", "none", "null"):
        return text.lower().replace("null", "none")
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted path. A list is one leaf."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{place}.{key}" if place else str(key))
    elif place:
        yield place, value


def _yaml(text: str) -> Iterator[tuple[str, str]]:
    """Yield `key: value` lines by their indentation; lists and blocks of text are left out."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"^( *)([\w.\-/]+):(?: +(.*))?$", re.sub(r"\s+#.*$", "", line))
        if not found:
            continue
        indent, key, value = len(found[1]), found[2], (found[3] or "").strip()
        above = [entry for entry in above if entry[0] < indent]
        if value:
            yield ".".join([*(name for _, name in above), key]), value
        else:
            above.append((indent, key))


def _shell(text: str) -> Iterator[tuple[str, str]]:
    known: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            words = line.split()
        for name, value in options(words):
            reference = re.fullmatch(r"\$\{?(\w+)\}?", value)
            known[name] = known.get(reference[1], value) if reference else value
            yield name, known[name]


def options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield `--name value`, `--name=value`, `--switch` and `name=value`."""
    for number, word in enumerate(words):
        if assigned := re.fullmatch(r"(?:--?)?(\+{0,2}[A-Za-z_][\w.\-/]*)=(.*)", word, re.DOTALL):
            yield assigned[1], assigned[2]
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            after = words[number + 1] if number + 1 < len(words) else "--"
            has_value = not after.startswith("-") or re.fullmatch(r"-[\d.]+(e-?\d+)?", after)
            yield word, after if has_value else "true"


def _python(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from ((name, value) for name in names for value in _literals(node.value))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {part.arg: value for part in call.keywords if part.arg for value in _literals(part.value)}
        if name == "add_argument":
            names = [text for argument in call.args for text in _literals(argument) if isinstance(text, str)]
            yield from ((names[-1], given["default"]) for _ in given if names and "default" in given)
        elif name[:1].isupper():
            yield from ((f"{name}.{key}", value) for key, value in given.items())


def _literals(node: ast.AST | None) -> list[Any]:
    """Return the value of a literal in a list; an empty list for other code."""
    try:
        return [] if node is None else [ast.literal_eval(node)]  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
