"""Name the variants and their reciprocal layers. Needs no torch.

A new arrangement of layers is a row of PATTERNS. A new attention is a file in ra/custom; its name is the variant's.
ra/published has parts from the literature in the same form.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.errors import UserError

LEARNED = "RALEARN"

# name -> the reciprocal layers among L layers; None: every layer learns its share
PATTERNS: dict[str, Callable[[int], frozenset[int]] | None] = {
    "B": lambda L: frozenset(),
    "RAEARLY": lambda L: frozenset(range(L // 2)),
    "RALATE": lambda L: frozenset(range(L // 2, L)),
    "RAALL": lambda L: frozenset(range(L)),
    "RAALT": lambda L: frozenset(range(1, L, 2)),
    LEARNED: None,
}
LISTED = re.compile(r"RA:[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
CUSTOM_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
CUSTOM_FOLDER = Path(__file__).with_name("custom")
PUBLISHED_FOLDER = Path(__file__).with_name("published")


class VariantError(UserError, ValueError):
    """The name is not a variant of this model."""


def custom_variants() -> list[str]:
    """List the custom variants: the names of the files in ra/custom, in upper case."""
    return _file_variants(CUSTOM_FOLDER)


def published_variants() -> list[str]:
    """List the variants from the literature: the names of the files in ra/published, in upper case."""
    return _file_variants(PUBLISHED_FOLDER)


def built_in_variants() -> list[str]:
    """List the names that no custom variant may have."""
    return [*PATTERNS, *published_variants()]


def known_variants() -> list[str]:
    """List all variants but those that name layers, RA:..."""
    return [*built_in_variants(), *custom_variants()]


def files_with(part: str) -> list[str]:
    """List the variants whose file defines the function `part`, as far as its text shows."""
    return [
        name
        for name in [*published_variants(), *custom_variants()]
        if part in _definitions(source(name).read_bytes())
    ]


def definitions(name: str) -> frozenset[str]:
    """Return the names of functions, classes and variables that the file of a variant defines; none without a file."""
    filed = name in published_variants() or name in custom_variants()
    return _definitions(source(name).read_bytes()) if filed else frozenset()


@functools.lru_cache(maxsize=256)
def _definitions(text: bytes) -> frozenset[str]:
    """Parse a file; nothing where it has a syntax error."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return frozenset(names | {target.id for target in targets if isinstance(target, ast.Name)})


def _file_variants(folder: Path) -> list[str]:
    return sorted(path.stem.upper() for path in folder.glob("*.py") if not path.stem.startswith("_"))


def source(name: str) -> Path:
    """Return the file that defines a published or a custom variant."""
    return (CUSTOM_FOLDER if is_custom(name) else PUBLISHED_FOLDER) / f"{name.lower()}.py"


def is_custom(name: str) -> bool:
    """Return whether a file in ra/custom defines the variant."""
    return name not in built_in_variants() and name in custom_variants()


def reciprocal_layers(name: str, layers: int) -> frozenset[int] | None:
    """Return the reciprocal layers (0 .. layers-1) of a variant; None for a learned, published or custom one.

    VariantError for an unknown name and for a listed layer that the model lacks.
    """
    if name in PATTERNS:
        pattern = PATTERNS[name]
        return pattern(layers) if pattern else None
    if name in known_variants():
        return None
    parts = [part for part in re.split(r"[,;]+(?=[A-Za-z]|$)", name) if part]
    if len(parts) > 1:
        raise VariantError(
            f'{name} is not a variant; spaces separate variants; did you mean "{" ".join(parts)}"?'
        )
    if not name.startswith("RA:"):
        known = known_variants()
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise VariantError(
            f"{name} is not a variant; {hint}fix: use {', '.join(known)}, or layers such as RA:5-7,9"
        )
    return _listed_layers(name, layers)


def refuse_misnamed_files() -> None:
    """VariantError for a file in ra/custom whose name cannot be a variant's, so that no file is ignored in silence."""
    for path in sorted(CUSTOM_FOLDER.glob("*.[pP][yY]")):
        stem = path.name[:-3]
        if stem.startswith("_"):
            continue
        suggestion = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")
        if not suggestion[:1].isalpha() or suggestion.upper() in built_in_variants():
            suggestion = f"my_{suggestion}".rstrip("_")
        problem = ""
        if stem.upper() in built_in_variants():
            problem = f"has the name of the built-in variant {stem.upper()}, which would be used instead"
        elif stem != stem.lower() or path.suffix != ".py":
            problem = "has upper-case letters; the file of variant NAME is name.py"
        elif not CUSTOM_NAME.fullmatch(stem):
            problem = "is not a variant name; a name has letters, digits and _, the first a letter"
        if problem:
            raise VariantError(
                f"ra/custom/{path.name} {problem}; fix: rename it, for example to ra/custom/{suggestion}.py "
                f"(variant {suggestion.upper()})"
            )


def is_fixed_pattern(attention: str) -> bool:
    """Return whether the attention is the baseline's with W_Q and W_K renamed in some layers, or none."""
    return bool(LISTED.fullmatch(attention)) or PATTERNS.get(attention) is not None


def _listed_layers(name: str, layers: int) -> frozenset[int]:
    """Parse the layers of `RA:5-7,9`. VariantError for a layer that the model lacks or that is listed twice."""
    if not LISTED.fullmatch(name):
        raise VariantError(
            f"{name} is malformed; fix: list layers and ranges of layers with commas, such as RA:5-7,9"
        )
    chosen: list[int] = []
    for part in name.removeprefix("RA:").split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise VariantError(f"{name}: the range {part} is descending; fix: {last}-{first}")
        for layer in (int(first), int(last or first)):
            if layer >= layers:
                raise VariantError(
                    f"{name}: there is no layer {layer}; fix: use layers 0 to {layers - 1} of this model"
                )
        chosen += range(int(first), int(last or first) + 1)
    twice = sorted({layer for layer in chosen if chosen.count(layer) > 1})
    if twice:
        raise VariantError(f"{name}: layer {twice[0]} is listed twice; fix: list each layer once")
    return frozenset(chosen)


def one_class(controls: Sequence[str]) -> str:
    """Say what several control arms have in common."""
    return (
        f"{', '.join(controls[:-1])} and {controls[-1]} are control arms (A/A): one function with W_Q and W_K renamed "
        "in some layers. Differences among them are noise."
    )
