"""Compare the checklists of two machines: rows in three grades with the reason why each matters."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numerics.dump_files import write_json, writing
from numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    HARMLESS,
    NO_DIGEST,
    NOT_RECORDED,
    SUSPECT,
    UNSHOWN,
    WORST_FIRST,
    ChecklistRow,
    EntryRule,
    apply_rule,
    compare_tables,
    compare_values,
    counts,
    listed,
    worst_first,
)
from numerics.setup.checklist_zip import FIRST_FORWARD, Snapshot, Table, read_snapshot
from numerics.setup.environment_variables import variable_meaning
from pages.document import HTML, Block, Details, Document, Note, Only, Paragraph, Section
from pages.document import Table as PageTable
from pages.page import render_html

MEANING = (
    "fatal: something else is computed; suspect: more than rounding may change; harmless: rounding, speed or places; "
    "not recorded: agreement cannot be shown."
)
MOST_ROWS = 8  # of modules or parameters that differ
VERSION = "another version may use other kernels and another order of sums; the computed function is the same"
CALLED = "it defines the model, the data or the training: defaults and functions change between versions"
# Packages of which a version can change more than rounding.
COMPUTING = (
    "torch torchvision torch-npu transformers tokenizers datasets accelerate deepspeed peft trl verl vllm sglang "
    "megatron-core transformer-engine apex flash-attn xformers triton bitsandbytes timm lightning mindspeed mindspore "
    "jax flax tensorflow numpy safetensors tiktoken"
)
# Words of a setting's name that decide its grade.
TRAINING = (
    "learning rate lr batch beta betas eps decay dropout warmup seed hidden layers heads seq length epochs steps clip "
    "momentum optimizer precision dtype accumulation"
)
ASIDE = "log logging save output wandb report run project port host master node workers"
PLACES = "dir path file folder"


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
    checks += compare_tables("environment", [[a.environment], [b.environment]], variable_meaning)
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
    return (
        (SUSPECT, CALLED)
        if name in COMPUTING.split()
        else (HARMLESS, "it is not known to compute in training")
    )


def setting_meaning(name: str) -> tuple[str, str]:
    """Return the grade and the reason of a setting that differs, by the words of its name."""
    words = set(re.split(r"[_.]", name))
    if words & set(ASIDE.split()):
        return HARMLESS, "a name, an output or a connection, by its name"
    if words & set(PLACES.split()):
        return SUSPECT, "a place: its content is compared only if it is packed"
    if words & set(TRAINING.split()):
        return FATAL, "a setting of the model or of training differs"
    return SUSPECT, "a setting differs; its effect is unknown"


def _hyperparameters(one: dict[str, str], two: dict[str, str]) -> list[ChecklistRow]:
    def meaning(name: str) -> tuple[str, str]:
        grade, reason = setting_meaning(name)
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
        digests = [table[name].get("digest", "") for table in (one, two)]
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
    digest = f"digest {entry.get('digest', '')[:12]}"
    return f"norm {entry['norm']}, {digest}" if entry.get("norm") else digest


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
    """Compare scripts by name: the first line that differs, without comments and blanks at its end."""
    one, two = a.scripts or {}, b.scripts or {}
    found = []
    for name in sorted(one.keys() | two.keys()):
        values: list[str] = []
        lines = [side.texts.get(name, "").splitlines() for side in (a, b)]
        pairs = enumerate(itertools.zip_longest(*lines, fillvalue="(end)"), 1)
        different = next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), None)
        if name not in one or name not in two:
            values = ["present" if name in table else "absent" for table in (one, two)]
        elif different:
            values = [f"line {different[0]}: {text.strip()[:60]}" for text in different[1]]
        else:
            values = [f"sha256 {table[name].get('sha256', '')[:12]}" for table in (one, two)]
        sides = [{value} for value in values]
        found.append(
            compare_values("scripts", name, sides, SUSPECT, "the text differs, at first in this line")
        )
    return found


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


@dataclasses.dataclass(frozen=True)
class ZipComparison:
    """The compared zips of two machines."""

    labels: tuple[str, str]
    checks: list[ChecklistRow]

    @property
    def verdict(self) -> str:
        """The worst status of a row, or equal."""
        found = {check.status for check in self.checks}
        return next((grade for grade in WORST_FIRST if grade in found), EQUAL)


def compare_checklists(a: str | Path, b: str | Path) -> ZipComparison:
    """Read and compare two zips. NumericsError names the one that cannot be used."""
    one, two = Path(a), Path(b)
    labels = (one.name, two.name) if one.name != two.name else (str(one), str(two))
    return ZipComparison(labels, worst_first(compare_snapshots(read_snapshot(one), read_snapshot(two))))


def comparison_document(comparison: ZipComparison) -> Document:
    """Return the document: differences the worst first, equal entries behind a fold."""
    rows = [
        [f"{c.group}: {c.subject}", c.status, *c.values, c.reason]
        for c in comparison.checks
        if c.status != EQUAL
    ]
    equal = [[c.group, c.subject, c.values[0]] for c in comparison.checks if c.status == EQUAL]
    differing = PageTable(["Entry", "Grade", *comparison.labels, "Reason"], rows, (1, 2, 3, 4))
    same = Details(f"{len(equal)} equal entries", [PageTable(["Group", "Entry", "Value"], equal, (0, 1, 2))])
    blocks: list[Block] = [
        Paragraph(f"Entries: {counts(comparison.checks)}." if comparison.checks else "No entries."),
        Section("Differences", [differing]),
        Only((HTML,), [same]),
        Note(MEANING),
    ]
    return Document(f"Checklist: {comparison.verdict}", blocks, " | ".join(comparison.labels))


def write_comparison(comparison: ZipComparison, folder: Path) -> list[Path]:
    """Write check_config.json and check_config.html. Returns their paths."""
    data, page = folder / "check_config.json", folder / "check_config.html"
    rows = [
        {
            "group": c.group,
            "entry": c.subject,
            "grade": c.status,
            "a": c.values[0],
            "b": c.values[1],
            "reason": c.reason,
        }
        for c in comparison.checks
    ]
    with writing(folder, "give another folder by -o"):
        a, b = comparison.labels
        write_json(data, {"verdict": comparison.verdict, "a": a, "b": b, "rows": rows})
        page.write_text(render_html(comparison_document(comparison)), encoding="utf-8")
    return [data, page]
