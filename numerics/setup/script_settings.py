"""Read settings from training scripts and configuration files.

Shell: `--name value`, `name=value`. JSON, TOML and YAML: leaves by dotted path. All names of a side form one table,
because scripts of two machines have different names. Python gives none: its text is compared.
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

ALIASES = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size"}


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
                pairs = []
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
