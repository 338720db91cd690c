"""The Python files and the configuration of an arm that transformers has no model of.

The folder contains a copy of every file of this project that the model needs, with relative imports, and
modeling_arm.py, which names the parts of the arm. transformers runs them with trust_remote_code=True.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.artifacts.provenance import revision
from gpt2.config.config import ModelConfig
from gpt2.interop.flatten import flat_name, flatten
from ra import builders, names
from ra.arms import Arm
from ra.hooks import load_hooks, module_name
from ra.names import LEARNED, PATTERNS, known_variants, reciprocal_layers
from ra.settings import AlternationSettings
from ra.spec import AttentionSpec

ROOT = Path(__file__).resolve().parents[2]
MODELLING = "modeling_arm"
INSTEAD = {"ra.hooks": "ra.spec"}  # files of variants import AttentionSpec from ra.hooks, which loads them
HEADER = "# Exported: "  # the first line of every exported Python file
CLASSES = {"AutoConfig": "ArmConfig", "AutoModelForCausalLM": "ArmForCausalLM"}


@dataclass(frozen=True)
class Part:
    """The builder of a part of the model: an expression with a function of a module. formula: what it computes."""

    module: str
    function: str
    expression: str
    formula: str


def arm_parts(arm: Arm, model: ModelConfig, alternation: AlternationSettings) -> dict[str, Part]:
    """Return part -> what builds it, for the parts that are not GPT-2's. Noise on norms is of training only."""
    spec = AttentionSpec(model.layers, model.heads, model.width, model.dropout, alternation, model.block_size)
    found: dict[str, Part] = {}

    def from_file(variant: str, part: str) -> Part:
        module = module_name(variant)
        return Part(module, part, part, _first_lines(names.source(variant).read_text(encoding="utf-8")))

    if arm.attention == LEARNED:
        formula = builders.MIXES[alternation.mix].__doc__ or ""
        found["attention"] = Part("ra.builders", "learned", "learned", _paragraphs(formula))
    elif arm.attention not in PATTERNS and arm.attention in known_variants():
        found |= {part: from_file(arm.attention, part) for part in load_hooks(arm.attention, spec).parts}
    elif layers := reciprocal_layers(arm.attention, model.layers):
        shown = ", ".join(map(str, sorted(layers)))
        formula = f"Query and key are exchanged in the layers {shown}."
        found["attention"] = Part("ra.builders", "fixed", f"fixed({sorted(layers)})", formula)
    return found | {part: from_file(file, part) for part, file in arm.parts}


def python_files(name: str, parts: dict[str, Part]) -> dict[str, str]:
    """Return file -> text. FlattenError for a variant whose imports cannot be copied."""
    texts = {MODELLING: _modelling(name, parts, [])}
    code = revision(ROOT)
    commit = (code.commit or "unknown") + (", with local changes" if code.dirty else "")

    def source(module: str) -> str | None:
        if module in texts:
            return texts[module]
        path = _path(module)
        return path.read_text(encoding="utf-8") if path else None

    needed = sorted(set(flatten(MODELLING, source, INSTEAD)) - {MODELLING})
    texts[MODELLING] = _modelling(name, parts, needed)
    found = {}
    for module, text in flatten(MODELLING, source, INSTEAD).items():
        path = _path(module)
        origin = f"written by `make export`, commit {commit}"
        if path and path.parent == names.CUSTOM_FOLDER:
            origin = f"the custom variant's file ra/custom/{path.name}, as its study recorded it"
        elif path:
            origin = f"{path.relative_to(ROOT).as_posix()} of commit {commit}"
        licence = "" if path and path.parent == names.CUSTOM_FOLDER else _licence()
        found[f"{flat_name(module)}.py"] = f"{HEADER}{origin}; imports made relative.\n{licence}{text}"
    return found


def arm_config(
    name: str, model: ModelConfig, alternation: AlternationSettings, parts: dict[str, Part], eot: int
) -> dict[str, Any]:
    """Return config.json without use_cache and the run's facts. eot: the id of the end of text."""
    return {
        "architectures": [CLASSES["AutoModelForCausalLM"]],
        "auto_map": {kind: f"{MODELLING}.{found}" for kind, found in CLASSES.items()},
        "model_type": "attention_arm",
        "arm": name,
        "parts": {part: f"{what.module}.{what.expression}" for part, what in sorted(parts.items())},
        "alternation": dataclasses.asdict(alternation),
        "vocab_size": model.vocabulary,
        "padded_vocab_size": model.padded_vocabulary,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.block_size,
        "dropout": model.dropout,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _modelling(name: str, parts: dict[str, Part], needed: Sequence[str]) -> str:
    """Return the modelling file. needed: all modules that are copied."""
    imports = sorted(
        {f"from {part.module} import {part.function} as {kind}_builder" for kind, part in parts.items()}
    )
    functions = ", ".join(
        f'"{kind}": {part.expression.replace(part.function, f"{kind}_builder", 1)}'
        for kind, part in sorted(parts.items())
    )
    return "\n".join(
        [
            f'"""The arm {name} for transformers: from_pretrained(folder, trust_remote_code=True)."""',
            "",
            *imports,
            "from study.export.causal_lm import ArmConfig as Config, ArmForCausalLM as Model",
            "",
            "# transformers 5.0 copies the files that this file imports, and not the files that those import",
            *(f"from {module} import __name__ as _" for module in needed),
            "",
            "",
            f"class {CLASSES['AutoConfig']}(Config):",
            f'    """The settings of {name}."""',
            "",
            "    def __init__(self, **options):  # transformers replaces an inherited one",
            "        super().__init__(**options)",
            "",
            "",
            f"class {CLASSES['AutoModelForCausalLM']}(Model):",
            f'    """GPT-2 with the parts of {name}."""',
            "",
            f"    config_class = {CLASSES['AutoConfig']}",
            f"    functions = {{{functions}}}",
            "",
        ]
    )


def _path(module: str) -> Path | None:
    """Return the file of a module of this project; None for other modules."""
    parts = module.split(".")
    if parts[:2] == ["ra", "custom"] and len(parts) == 3:
        path = names.CUSTOM_FOLDER / f"{parts[2]}.py"
        return path if path.is_file() else None
    path = ROOT.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _licence() -> str:
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n")
    return f"# {lines[0]}. {lines[2]}. See LICENSE.\n"


def _first_lines(text: str) -> str:
    """Return the start of a file's docstring: its title and its formula."""
    return _paragraphs(ast.get_docstring(ast.parse(text)) or "")


def _paragraphs(text: str, count: int = 2) -> str:
    return "\n\n".join(inspect.cleandoc(text).split("\n\n")[:count])
