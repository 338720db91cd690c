"""Read hyperparameters from training scripts and configuration files, and grade a difference.

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

from numerics.checklist.checks import FATAL, HARMLESS, SUSPECT
from numerics.checklist.secrets import REMOVED, is_secret, redact

ALIASES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "bsz": "batch_size",
    "seq_len": "seq_length",
}
TRAINING = {
    "lr", "learning", "rate", "batch", "beta", "beta1", "beta2", "betas", "eps", "epsilon", "decay", "dropout",
    "warmup", "warm", "seed", "hidden", "layers", "layer", "heads", "width", "seq", "sequence", "length", "block",
    "epochs", "epoch", "steps", "iters", "iterations", "clip", "clipping", "momentum", "optimizer", "optim",
    "scheduler", "schedule", "precision", "dtype", "bf16", "fp16", "fp8", "amp", "accumulation", "vocab",
    "temperature", "kl", "gamma", "norm", "activation", "loss", "scale", "init", "rope", "theta", "mask",
    "shuffle", "samples", "tokens", "dataset", "parallel", "tp", "pp", "cp", "ep", "sp", "dp", "zero", "model",
    "tokenizer",
}  # fmt: skip
ASIDE = {
    "log", "logs", "logging", "save", "saving", "output", "out", "wandb", "tensorboard", "report", "run",
    "project", "exp", "experiment", "port", "host", "addr", "address", "master", "node", "nnodes", "workers",
    "verbose", "profile", "profiler", "timeout", "print", "debug",
}  # fmt: skip
PLACES = {"dir", "directory", "path", "paths", "file", "files", "folder"}


def meaning(name: str) -> tuple[str, str]:
    """Return the grade and the reason of a hyperparameter that differs."""
    words = set(re.split(r"[_.]", name))
    if words & ASIDE:
        return HARMLESS, "a name, an output or a connection, by its name"
    if words & PLACES:
        return SUSPECT, "a place: its content is compared only if it is packed"
    if words & TRAINING:
        return FATAL, "a setting of the model or of training differs"
    return SUSPECT, "a setting differs; its effect is unknown"


def hyperparameters(name: str, text: str) -> dict[str, set[str]]:
    """Return setting -> values of one file. A file that cannot be parsed gives none: its text is compared."""
    suffix = name.rpartition(".")[2].lower()
    try:
        match suffix:
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
        add(found, key, value)
    return found


def add(found: dict[str, set[str]], name: str, value: Any) -> None:
    """Add a setting under its normal name, without secrets."""
    key = normal_name(name)
    text = normal_value(value)
    found.setdefault(key, set()).add(REMOVED if is_secret(name, text) else redact(text))


def normal_name(name: str) -> str:
    """Return a name in lower case with underscores; abbreviations as the long name."""
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name.strip().lstrip("-+"))
    head, dot, last = key.lower().replace("-", "_").rpartition(".")
    return f"{head}{dot}{ALIASES.get(last, last)}"


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
        return "none" if text.lower() == "null" else text.lower()
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:.15g}"


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of nested mappings by dotted path. A list is one leaf."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{place}.{key}" if place else str(key))
    elif place:
        yield place, value


def _yaml(text: str) -> Iterator[tuple[str, str]]:
    """Read `key: value` lines with their indentation; lists and blocks of text are left out."""
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
            value = known.get(reference[1], value) if reference else value
            known[name] = value
            yield name, value


def options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Read `--name value`, `--name=value`, `--switch` and `name=value`."""
    for number, word in enumerate(words):
        if assigned := re.fullmatch(r"(?:--?)?(\+{0,2}[A-Za-z_][\w.\-/]*)=(.*)", word, re.DOTALL):
            yield assigned[1], assigned[2]
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            after = words[number + 1] if number + 1 < len(words) else "--"
            has_value = not after.startswith("-") or re.fullmatch(r"-[\d.]+(e-?\d+)?", after)
            yield word, after if has_value else "true"


def _python(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and _is_literal(value):
                yield target.id, ast.literal_eval(value)  # type: ignore[arg-type]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {
            part.arg: ast.literal_eval(part.value)
            for part in call.keywords
            if part.arg and _is_literal(part.value)
        }
        if name == "add_argument":
            names = [
                arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
            if names and "default" in given:
                yield names[-1], given["default"]
        elif name[:1].isupper():
            yield from ((f"{name}.{key}", value) for key, value in given.items())


def _is_literal(node: ast.AST | None) -> bool:
    if node is None:
        return False
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
