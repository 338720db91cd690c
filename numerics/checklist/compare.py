"""Compare the checklists of two machines: rows in three grades with the reason why each matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from numerics.checklist import hyperparameters, variables
from numerics.checklist.checks import (
    EQUAL,
    FATAL,
    HARMLESS,
    NO_DIGEST,
    NOT_RECORDED,
    SUSPECT,
    UNSHOWN,
    ChecklistRow,
    EntryRule,
    apply_rule,
    compare_tables,
    compare_values,
    listed,
)
from numerics.checklist.snapshot import FIRST_FORWARD, Snapshot, Table

MOST_ROWS = 8  # of modules or parameters that differ
VERSION = "another version may use other kernels and another order of sums; the computed function is the same"
CALLED = "it defines the model, the data or the training: defaults and functions change between versions"
# Packages of which a version can change more than rounding.
COMPUTING = {
    "torch", "torchvision", "torchaudio", "torch-npu", "transformers", "tokenizers", "sentencepiece", "datasets",
    "accelerate", "deepspeed", "peft", "trl", "verl", "vllm", "sglang", "megatron-core", "transformer-engine",
    "apex", "flash-attn", "xformers", "triton", "bitsandbytes", "timm", "diffusers", "lightning",
    "pytorch-lightning", "torchtitan", "torchtune", "mindspeed", "mindspore", "jax", "flax", "tensorflow", "optax",
    "numpy", "scipy", "safetensors", "torchdata", "webdataset", "pillow", "nltk", "tiktoken", "llamafactory",
    "unsloth", "liger-kernel",
}  # fmt: skip


def _machine(subject: str, severity: str, reason: str) -> EntryRule[Snapshot]:
    return EntryRule(
        "machine", subject, lambda one: one.machine.get(subject), severity, reason, optional=True
    )


TF32 = "TF32 keeps 10 bits of a float32's 23"
ATOMIC = "the order of sums may differ from run to run: rounding only"
MACHINE = (
    _machine("device", HARMLESS, "rounding differs between devices"),
    _machine("platform", HARMLESS, VERSION),
    _machine("python", HARMLESS, "it computes no tensor"),
    _machine("CUDA", HARMLESS, VERSION),
    _machine("ROCm", HARMLESS, VERSION),
    _machine("cuDNN or MIOpen", HARMLESS, VERSION),
    _machine("CPU threads", HARMLESS, "sums are split among threads: rounding only"),
    _machine("default dtype", FATAL, "tensors without a dtype have another number format"),
    _machine("float32 products", FATAL, f"torch's setting: {TF32}"),
    _machine("TF32 of convolutions", SUSPECT, f"it acts on a device with TF32: {TF32}"),
    _machine("reduced-precision sums of float16", SUSPECT, "products may be summed in float16"),
    _machine("reduced-precision sums of bfloat16", SUSPECT, "products may be summed in bfloat16"),
    _machine("deterministic algorithms", HARMLESS, ATOMIC),
    _machine("cuDNN benchmark", HARMLESS, "it selects kernels by their speed: rounding only"),
)
DATA = "the runs read different data"
RANDOM = "the generator was seeded differently or was used another number of times; random numbers differ from here on"


def compare_snapshots(a: Snapshot, b: Snapshot) -> list[ChecklistRow]:
    """Compare every entry of two machines, group by group."""
    checks = [check for rule in MACHINE if (check := apply_rule(rule, [[({}, a)], [({}, b)]]))]
    checks += compare_tables("environment", [[a.environment], [b.environment]], variables.meaning)
    checks += compare_tables("packages", [[a.packages], [b.packages]], _package, absent="not installed")
    checks += _optional(
        "hyperparameters",
        (a.hyperparameters, b.hyperparameters),
        "pass shell_path or hyperparameters",
        _hyperparameters,
    )
    checks += _optional("model", (a.modules, b.modules), "pass model", _modules)
    checks += _optional("weights", (a.parameters, b.parameters), "pass model", _parameters)
    checks += _optional("data", (a.data, b.data), "pass data, or model and run one forward pass", _data)
    checks += _optional("random", (a.random, b.random), "pass model", _random)
    checks += _optional("scripts", (a.scripts, b.scripts), "pass shell_path", lambda *_: _scripts(a, b))
    return checks


def _optional(
    group: str,
    tables: tuple[dict[str, Any] | None, dict[str, Any] | None],
    how: str,
    compare: Callable[..., list[ChecklistRow]],
) -> list[ChecklistRow]:
    """Compare a table that not every zip has. Without one, a row says that agreement cannot be shown."""
    one, two = tables
    if one is None and two is None:
        reason = f"neither zip has them, so agreement cannot be shown; fix: {how} to ConfigChecker"
        return [ChecklistRow(group, group, NOT_RECORDED, (NOT_RECORDED, NOT_RECORDED), reason, False)]
    if one is None or two is None:
        values = tuple(NOT_RECORDED if table is None else f"{len(table)} entries" for table in tables)
        reason = (
            f"one zip lacks them, so agreement cannot be shown; fix: {how} to ConfigChecker on both sides"
        )
        return [ChecklistRow(group, group, NOT_RECORDED, values, reason, False)]
    return compare(one, two)


def _package(name: str) -> tuple[str, str]:
    return (SUSPECT, CALLED) if name in COMPUTING else (HARMLESS, "it is not known to compute in training")


def _hyperparameters(one: dict[str, str], two: dict[str, str]) -> list[ChecklistRow]:
    def meaning(name: str) -> tuple[str, str]:
        grade, reason = hyperparameters.meaning(name)
        if grade == HARMLESS or (name in one and name in two):
            return grade, reason
        return SUSPECT, "it is set on one side only: the other side has its default"

    return compare_tables("hyperparameters", [[one], [two]], meaning)


def _modules(one: Table, two: Table) -> list[ChecklistRow]:
    """Compare the module trees: a missing part by its top module, a changed module by its settings."""
    checks: list[ChecklistRow] = []
    for path in _tops(one.keys() ^ two.keys()):
        here = path in one
        kind = _class_name((one if here else two)[path])
        values = (kind, "absent") if here else ("absent", kind)
        checks.append(
            ChecklistRow("model", path, FATAL, values, "a part of the model is on one side only", True)
        )
    for path in [path for path in one if path in two]:
        checks += _settings(path, one[path], two[path])
    if not checks:
        return [_all_equal("model", "module tree", len(one), "modules")]
    return _limited(checks, "module tree")


def _settings(path: str, one: Mapping[str, str], two: Mapping[str, str]) -> list[ChecklistRow]:
    """Return a row for each setting of a module that differs. The representation counts where no setting does."""
    names = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
    if len(names) > 1:
        names = [name for name in names if name != "representation"]
    if _class_name(one) != _class_name(two):
        names = ["class"]
    checks = []
    for name in names:
        values = (one.get(name, "absent"), two.get(name, "absent"))
        grade, reason = FATAL, "the module computes something else"
        if name == "training":
            grade, reason = SUSPECT, "dropout and batch statistics act in training mode only"
        elif name == "class" and _class_name(one) == _class_name(two):
            grade, reason = SUSPECT, "a class of the same name from another file"
        elif all("/" in value for value in values):
            grade, reason = HARMLESS, "a path"
        checks.append(ChecklistRow("model", f"{path}: {name}", grade, values, reason, grade == FATAL))
    return checks


def _class_name(module: Mapping[str, str]) -> str:
    return module.get("class", "?").rpartition(".")[2]


def _tops(paths: set[str]) -> list[str]:
    """Return the paths that have no ancestor among the paths."""

    def ancestors(path: str) -> set[str]:
        parts = path.split(".")
        return {".".join(parts[:length]) for length in range(1, len(parts))}

    return sorted(path for path in paths if not ancestors(path) & paths)


def _parameters(one: Table, two: Table) -> list[ChecklistRow]:
    """Compare names, forms and values of parameters and buffers."""
    reasons = {
        "kind": "a parameter is trained, a buffer is not",
        "shape": "the tensors have different shapes",
        "dtype": "the number formats differ",
        "trained": "another set of parameters is trained",
        "tied": "a tied weight receives the gradients of all its uses",
    }
    checks = [
        ChecklistRow("weights", name, FATAL, _present(name, one, two), "a tensor is on one side only", True)
        for name in sorted(one.keys() ^ two.keys())
    ]
    values: list[ChecklistRow] = []
    unknown: list[str] = []  # without a digest
    for name in [name for name in one if name in two]:
        differing = [key for key in reasons if one[name].get(key) != two[name].get(key)]
        for key in differing:
            texts = tuple(table[name].get(key) or "no" for table in (one, two))
            checks.append(ChecklistRow("weights", f"{name}: {key}", FATAL, texts, reasons[key], True))
        digests = [table[name].get("sha256", "") for table in (one, two)]
        if not differing and any(NO_DIGEST in digest for digest in digests):
            unknown.append(name)
        elif not differing and digests[0] != digests[1]:
            texts = tuple(_value(table[name]) for table in (one, two))
            values.append(ChecklistRow("weights", name, FATAL, texts, "the values differ", True))
    compared = sum(name in two for name in one)
    if values:
        reason = (
            f"{len(values)} of {compared} tensors have other values: another seed, checkpoint or conversion"
        )
        values = [ChecklistRow("weights", one_.subject, FATAL, one_.values, reason, True) for one_ in values]
    rows = [*_limited(checks, "names and forms"), *_limited(values, "values")]
    equal = compared - len(unknown)
    if not rows and equal:
        rows = [_all_equal("weights", "parameters and buffers", equal, "tensors")]
    if unknown:
        count = f"{len(unknown)} tensors without a digest"
        reason = f"{UNSHOWN}: {listed(unknown)}"
        rows.append(ChecklistRow("weights", "unread values", NOT_RECORDED, (count, count), reason, False))
    return rows


def _present(name: str, *tables: Table) -> tuple[str, ...]:
    return tuple(
        f"{table[name].get('dtype')} {table[name].get('shape')}" if name in table else "absent"
        for table in tables
    )


def _value(entry: Mapping[str, str]) -> str:
    digest = entry.get("sha256", "")[:12]
    return f"norm {entry['norm']}, sha256 {digest}" if entry.get("norm") else f"sha256 {digest}"


def _data(one: dict[str, str], two: dict[str, str]) -> list[ChecklistRow]:
    """Compare digests. A side that ran no forward pass is not recorded."""
    sides = [{name for name in table if name.startswith(FIRST_FORWARD)} for table in (one, two)]
    unknown = sides[0] ^ sides[1] if not all(sides) else set()
    tables = [[{name: text for name, text in table.items() if name not in unknown}] for table in (one, two)]

    def meaning(name: str) -> tuple[str, str]:
        return (FATAL, DATA) if name in one and name in two else (SUSPECT, "the data is on one side only")

    checks = compare_tables("data", tables, meaning, absent="absent")
    if unknown:
        values = tuple(f"{len(names)} inputs" if names else NOT_RECORDED for names in sides)
        reason = "one zip has no forward pass, so agreement cannot be shown; fix: run one after ConfigChecker"
        checks.append(ChecklistRow("data", FIRST_FORWARD, NOT_RECORDED, values, reason, False))
    return checks


def _random(one: dict[str, str], two: dict[str, str]) -> list[ChecklistRow]:
    """Compare the generators that both sides have."""
    shared = one.keys() & two.keys()
    tables = [[{name: table[name] for name in shared}] for table in (one, two)]
    return compare_tables("random", tables, lambda name: (SUSPECT, RANDOM))


def _scripts(a: Snapshot, b: Snapshot) -> list[ChecklistRow]:
    """Compare scripts by name; the only unmatched script of a kind on each side by kind."""
    one, two = a.scripts or {}, b.scripts or {}
    pairs = [(name, name) for name in one if name in two]
    alone = [[name for name in table if name not in other] for table, other in ((one, two), (two, one))]
    for kind in sorted({PurePosixPath(name).suffix for name in alone[0]}):
        left, right = ([name for name in names if PurePosixPath(name).suffix == kind] for names in alone)
        if len(left) == len(right) == 1:
            pairs.append((left[0], right[0]))
    matched = [{pair[side] for pair in pairs} for side in (0, 1)]
    checks = [_script(*pair, a, b) for pair in pairs]
    for side, table in enumerate((one, two)):
        for name in sorted(table.keys() - matched[side]):
            values = ("present", "absent") if side == 0 else ("absent", "present")
            checks.append(
                ChecklistRow("scripts", name, SUSPECT, values, "the script is on one side only", False)
            )
    return checks


def _script(left: str, right: str, a: Snapshot, b: Snapshot) -> ChecklistRow:
    entries = ((a.scripts or {})[left], (b.scripts or {})[right])
    subject = left if left == right else f"{left} and {right}"
    found = [{f"sha256 {entry.get('sha256', '')[:12]}"} for entry in entries]
    if entries[0].get("code") and entries[0].get("code") == entries[1].get("code"):
        return compare_values(
            "scripts", subject, found, HARMLESS, "only comments, docstrings or layout differ"
        )
    lines = [snapshot.texts.get(name, "").splitlines() for snapshot, name in ((a, left), (b, right))]
    where = next(
        (number for number, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]),
        min(map(len, lines)),
    )
    if found[0] != found[1]:
        texts = [part[where].strip()[:60] if where < len(part) else "(end)" for part in lines]
        found = [{f"line {where + 1}: {text}"} for text in texts]
    return compare_values("scripts", subject, found, SUSPECT, "the text differs, at first in this line")


def _all_equal(group: str, subject: str, count: int, what: str) -> ChecklistRow:
    return ChecklistRow(group, subject, EQUAL, (f"{count} {what}", f"{count} {what}"), "", False)


def _limited(checks: Sequence[ChecklistRow], what: str) -> list[ChecklistRow]:
    """Return the first rows, and one row with the names of the others."""
    if len(checks) <= MOST_ROWS:
        return list(checks)
    others = checks[MOST_ROWS:]
    worst = FATAL if any(check.status == FATAL for check in others) else SUSPECT
    names = listed([check.subject for check in others])
    reason = f"further differences of the same kind: {names}"
    count = f"{len(others)} more differ"
    return [
        *checks[:MOST_ROWS],
        ChecklistRow(checks[0].group, what, worst, (count, count), reason, worst == FATAL),
    ]
