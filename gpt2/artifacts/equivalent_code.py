"""Identify the code of a run, and recognise versions of it that compute the same numbers.

run.json stores a digest of each loaded module. Two runs are comparable if their computing modules have the same
digests. A rewrite changes digests without changing any number, and it would make older studies incomparable. So
equivalent_code.json lists the modules of versions that compute the same:

    reference   commit 8aabecd, under its module names; digests of the source bytes
    present     the current modules; digests of the syntax tree (`module_digest`)
    former      modules that were present earlier; a list of digests for each

The evidence is tests/gpt2/train/test_reference_runs.py: losses and fingerprints of runs equal those recorded at the
reference commit. `python -m scripts.dev.equivalent_code` runs that test and then lists the current modules. A computing
module that is changed afterwards is in no list and differs from every earlier run. Standard library only.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

DIGITS = 16  # of a SHA-256, stored for each module
TABLE = Path(__file__).with_name("equivalent_code.json")
COMPUTING = (
    "gpt2.",
    "ra.",
    "aqn.",
    "rl.",
)  # packages whose code decides the numbers of a run; numerics observes
CUSTOM = ("ra.custom.", "ra.own.")  # a user's variants; ra.own is the folder's former name

# module at the reference commit -> the modules that replace it
RENAMED: dict[str, tuple[str, ...]] = {
    "gpt2.again": ("gpt2.model.recompute",),
    "gpt2.batch": ("gpt2.config.batch",),
    "gpt2.cards": ("gpt2.hardware.gpu_specs",),
    "gpt2.chart": (),  # drew a figure only
    "gpt2.checkpoint": ("gpt2.artifacts.checkpoint",),
    "gpt2.clock": ("gpt2.train.clocks",),
    "gpt2.config": ("gpt2.config.config",),
    "gpt2.corpus": ("gpt2.data.sources",),
    "gpt2.data": (
        "gpt2.data.dataset",
    ),  # as gpt2.hardware, gpt2.memory, gpt2.model, gpt2.train: now packages
    "gpt2.devices": ("gpt2.hardware.torch_devices",),
    "gpt2.diagnose": ("gpt2.train.nan_debug",),
    "gpt2.environment": ("gpt2.artifacts.provenance",),
    "gpt2.errors": ("gpt2.system.errors",),
    "gpt2.evaluate": ("gpt2.eval.validation",),
    "gpt2.exhaustion": ("gpt2.system.resource_errors",),
    "gpt2.feed": ("gpt2.data.prefetch",),
    "gpt2.fused": ("gpt2.hardware.attention_kernels",),
    "gpt2.hardware": ("gpt2.hardware.detect",),
    "gpt2.hellaswag": ("gpt2.eval.hellaswag", "gpt2.eval.hellaswag_download"),
    "gpt2.interrupt": ("gpt2.system.signals",),
    "gpt2.ledger": ("gpt2.artifacts.metrics_log", "gpt2.train.fingerprint"),
    "gpt2.linear": ("gpt2.model.cpu_linear",),
    "gpt2.loss": ("gpt2.model.loss",),
    "gpt2.memory": ("gpt2.memory.measure",),
    "gpt2.model": ("gpt2.model.transformer", "gpt2.model.init"),
    "gpt2.optim": ("gpt2.train.optimizer",),
    "gpt2.prediction": ("gpt2.memory.prediction",),
    "gpt2.processor": ("gpt2.hardware.cpu",),
    "gpt2.progress": ("gpt2.system.progress",),
    "gpt2.record": ("gpt2.artifacts.run_record", "gpt2.system.files"),
    "gpt2.resuming": ("gpt2.train.resume",),
    "gpt2.revision": ("gpt2.artifacts.provenance",),
    "gpt2.score": ("gpt2.eval.evaluator",),
    "gpt2.shards": ("gpt2.data.shards", "gpt2.data.manifest"),
    "gpt2.spikes": ("gpt2.train.loss_spikes",),
    "gpt2.step": ("gpt2.train.step",),
    "gpt2.symbols": ("gpt2.config.dotconfig",),
    "gpt2.target": ("gpt2.hardware.resolve",),
    "gpt2.tokenizer": ("gpt2.data.tokenizer",),
    "gpt2.track": ("gpt2.artifacts.experiment_loggers",),
    "gpt2.tracker": ("gpt2.memory.allocation_tracker",),
    "gpt2.train": ("gpt2.train.trainer", "gpt2.train.run_plan"),
    "gpt2.work": ("gpt2.memory.workload",),
    "ra.maps": ("ra.attention_maps",),
    "ra.own": ("ra.custom",),
    "ra.written_out": (),  # a reference of tests
}


@functools.cache
def module_digest(source: bytes) -> str:
    """Return the first DIGITS digits of a SHA-256 over the syntax tree, without docstrings, comments and layout.

    Imports and names count. Absent and empty fields of nodes are skipped, so that Python versions agree.
    """
    parts: list[str] = []
    _append_fields(ast.parse(source), parts)
    return hashlib.sha256("".join(f"{part}\0" for part in parts).encode()).hexdigest()[:DIGITS]


def _append_fields(node: ast.AST, parts: list[str]) -> None:
    """Append the name of the node's class and its fields. A list is faster than nested generators."""
    docstring = _docstring(node)
    joined = isinstance(node, ast.JoinedStr)
    parts.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or name == "kind":  # absent; kind: the u of u"text"
            continue
        for item in value if isinstance(value, list) else (value,):
            if docstring is not None and item is docstring:
                continue
            if joined and isinstance(item, ast.Constant) and not item.value:
                continue  # Python 3.12 adds empty texts
            parts.append(name)
            if isinstance(item, ast.AST):
                _append_fields(item, parts)
            else:
                parts.append(repr(item))
    parts.append("end")


def _docstring(node: ast.AST) -> ast.stmt | None:
    """Return the statement that is the node's docstring, if it has one."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    return None


@functools.cache
def equivalent_versions() -> Mapping[str, Mapping[str, str]]:
    """Read the versions of equivalent_code.json with one digest per module: version -> module -> digest."""
    table = json.loads(TABLE.read_text())
    return {version: table[version] for version in ("reference", "present")}


@functools.cache
def former_digests() -> Mapping[str, list[str]]:
    """Read the earlier digests of equivalent_code.json: module -> digests, oldest first."""
    former: dict[str, list[str]] = json.loads(TABLE.read_text())["former"]
    return former


def is_project_computing(name: str) -> bool:
    """Whether a module decides the numbers of a run and belongs to the project, not to a user."""
    return name.startswith(COMPUTING) and not name.startswith(CUSTOM)


def changed_code(code: Mapping[str, str], changed_after: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the modules of a record that are in no equivalent version, under their present names.

    Two runs compute the same if these are equal: both empty, or the same changes.

    changed_after: for a run whose numbers a listed change of a module did change, module -> its last digest before the
    change. All versions up to that one compute the same and are returned as that one.
    """
    versions, former = equivalent_versions(), former_digests()
    known = {pair for version in versions.values() for pair in version.items()}
    known |= {(name, digest) for name, digests in former.items() for digest in digests}
    changed = {
        present: digest
        for name, digest in code.items()
        if (name, digest) not in known
        for present in present_names(name)
    }
    for name, last in (changed_after or {}).items():
        older = former.get(name, [])
        older = older[: older.index(last)] if last in older else []
        if code.get(name) in (versions["reference"].get(name), *older, last):
            changed[name] = last
    return changed


def present_names(name: str) -> tuple[str, ...]:
    """Return the present names of a module of any version."""
    if name.startswith("ra.own."):
        return ("ra.custom." + name.removeprefix("ra.own."),)
    return RENAMED.get(name, (name,))
