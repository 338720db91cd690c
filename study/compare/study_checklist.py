"""Check that two studies are comparable, row by row, with the recorded values.

The rows are data: study.compare.study_checklist. Grades are those of referee.numerics.setup.checklist_rows, which any
training script uses (`python -m referee check-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ra.arms import split_rate
from ra.names import LEARNED
from referee.numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    HARMLESS,
    NOT_RECORDED,
    NOT_SET,
    ChecklistRow,
    compare_tables,
    compare_values,
)
from runtime.provenance import FORMAT, SATURATION, VARIABLES
from runtime.run_record import Environment
from study.hellaswag_scores import TASKS, EndingsTask, scored_items
from study.runs import FinishedRecord, Run

Read = Callable[[FinishedRecord], Any]


@dataclass(frozen=True)
class EntryRule:
    """One entry to compare. read: its value, None where the record lacks it. severity: of a difference.

    by: the kind of key (such as "seed") for an entry that may differ between keys. unknown: the reason shown where an
    entry that does not block is not recorded. optional: the row is left out where no record has the
    entry. unknown_blocks: whether a fatal entry also blocks where it is not recorded.
    """

    group: str
    subject: str
    read: Read
    severity: str
    reason: str
    by: str = ""
    unknown: str = "only the losses can show a difference"
    optional: bool = False
    unknown_blocks: bool = True


def _environment(read: Callable[[Environment], Any]) -> Read:
    """An entry of the environment; "none" where it has no value."""
    return lambda record: str(read(record.environment) or "none")


def _short(text: str | None) -> str | None:
    """The first digits of a hash."""
    return text if text is None or text == NOT_RECORDED else text[:12]


def _schedule(record: FinishedRecord) -> str:
    planned = record.schedule
    warmup = "" if planned.warmup_iterations is None else f", {planned.warmup_iterations:,} of warm-up"
    return f"{record.progress.iterations:,} of {planned.iterations:,} iterations{warmup}"


def _split(record: FinishedRecord) -> str:
    batch = record.batch
    return f"{batch.micro:,} x {batch.accumulation:,} x {batch.world_size:,}"


def _items(record: FinishedRecord, task: EndingsTask) -> str:
    items = scored_items(record, task)
    return str(items) if items else "not scored"


NUMBERS = "the row numbers shows whether the code computes the same"
VERSION = "another version may use other kernels and another order of sums; the computed function is the same"
RULES: tuple[EntryRule, ...] = (
    EntryRule("data", "data", lambda r: _short(r.fingerprint.data), FATAL, "the runs trained on different text"),
    EntryRule("data", "tokenizer", lambda r: _short(r.fingerprint.tokenizer), FATAL,
        "losses per token refer to different tokens"),
    EntryRule("data", "validation set", lambda r: _short(r.fingerprint.validation), FATAL,
        "losses refer to different text"),
    *(EntryRule("data", f"{task.name} items", partial(_items, task=task), HARMLESS,
        f"losses do not depend on them; {task.name} accuracies refer to different questions: do not compare them")
      for task in TASKS),
    EntryRule("model", "model", lambda r: _short(r.fingerprint.model), FATAL, "size, block size or dropout differ"),
    EntryRule("model", "parameters", lambda r: r.parameters and f"{r.parameters:,}", FATAL,
        "the variants are different models", by="variant"),
    EntryRule("model", "initial weights", lambda r: _short(r.fingerprint.initial_weights), FATAL,
        "one seed gives different initial weights", by="seed"),
    EntryRule("batch", "effective batch", lambda r: f"{r.batch.effective:,}", FATAL,
        "an optimizer step averages over a different number of sequences"),
    EntryRule("batch", "sequence length", lambda r: f"{r.batch.block_size:,}", FATAL, "the context lengths differ"),
    EntryRule("batch", "micro-batch x accumulation x processes", _split, HARMLESS,
        "the gradient is a mean over the same sequences however they are split; only rounding differs"),
    EntryRule("schedule", "schedule", _schedule, FATAL,
        "the learning rate is a function of iteration / planned iterations: the runs end at different points of it",
        by="variant"),
    EntryRule("schedule", "tuned learning rate", lambda r: split_rate(r.variant)[1] or None, FATAL,
        "each study chose the rates of its arms", by="variant", optional=True, unknown_blocks=False),
    EntryRule("precision", "precision", lambda r: r.target.dtype, FATAL, "the number formats differ"),
    EntryRule("precision", "float32 products", _environment(lambda e: e.float32_matmul), FATAL,
        "torch's setting: TF32 keeps 10 bits of a float32's 23"),
    EntryRule("precision", "attention backend", lambda r: r.target.attention_backend, HARMLESS,
        "every backend computes exact softmax attention; the order of sums differs"),
    EntryRule("machine", "device", lambda r: r.target.device, HARMLESS,
        "rounding differs between cards; times and memory too"),
    EntryRule("machine", "driver", lambda r: r.target.driver or "none", HARMLESS, VERSION),
    EntryRule("machine", "CUDA or ROCm", _environment(lambda e: e.cuda or e.rocm), HARMLESS, VERSION),
    EntryRule("machine", "cuDNN or MIOpen", _environment(lambda e: e.cudnn), HARMLESS, VERSION),
    EntryRule("machine", "CPU threads", _environment(lambda e: e.threads), HARMLESS,
        "sums are split among threads: rounding only"),
    EntryRule("machine", "platform", _environment(lambda e: e.platform), HARMLESS, VERSION),
    EntryRule("libraries", "torch", lambda r: r.target.torch, HARMLESS, VERSION),
    EntryRule("libraries", "triton", _environment(lambda e: e.triton), HARMLESS, "it compiles kernels: " + VERSION),
    EntryRule("libraries", "numpy", _environment(lambda e: e.numpy), HARMLESS,
        "it shuffles the batches: if the order changed, the losses part at the first step"),
    EntryRule("libraries", "python", _environment(lambda e: e.python), HARMLESS,
        "the text it prepares is compared under data"),
    EntryRule("code", "numbers", lambda r: str(r.fingerprint.numbers), FATAL,
        "the code computes other numbers from the same configuration"),
    EntryRule("code", "commit", lambda r: _short(r.commit), HARMLESS,
        NUMBERS),
    EntryRule("code", "uncommitted changes",
        lambda r: None if r.dirty is None else "yes" if r.dirty else "no",
        HARMLESS, NUMBERS),
)  # fmt: skip

# Each Kconfig symbol (for a choice in CHOICES.py, the choice) is in one of the tables below. A symbol
# in none of them, from another version of this project, is fatal where it differs.

# Settings that the rows above cover, or that only name things. SCHEDULE_WSD is the opposite of SCHEDULE_COSINE.
COVERED = (
    "DATASET_EMBEDDED", "DATASET_FILES", "DATASET_FINEWEB_EDU", "DATASET_LOCAL", "DATASET_MAX_TOKENS",
    "DATASET_OPENWEBTEXT", "DATASET_TINYSTORIES", "DATASET_WIKITEXT103", "DATA_DIR", "DETECTED", "DTYPE",
    "EFFECTIVE_BATCH", "EVAL_TOKENS", "GPT2_BLOCK_SIZE", "GPT2_DROPOUT", "GPT2_HEADS", "GPT2_LAYERS", "GPT2_MODEL",
    "GPT2_WIDTH", "MICRO_BATCH", "PRIMARY",
    "RESULTS_DIR", "SCALE_CPU", "SCHEDULE_COSINE", "SEEDS", "STUDY_NAME", "TARGET",
    "TARGET_DETECTED_CPU", "TOKENIZER", "VARIANTS",
)  # fmt: skip
OPTIMIZER = (
    "LEARNING_RATE", "MIN_LEARNING_RATE_RATIO", "WARMUP_FRACTION", "DECAY_FRACTION", "SCHEDULE_WSD", "WEIGHT_DECAY",
    "ADAM_BETA1", "ADAM_BETA2", "ADAM_EPSILON", "GRAD_CLIP",
)  # fmt: skip
LIMITS = ("GPT2_MAX_TIME", "GPT2_MAX_TOKENS", "GPT2_MAX_ITERS")
HASHED = (*OPTIMIZER, *LIMITS, "CONTINUES")  # all settings in the fingerprint's hash of the schedule
LEARNED_SETTINGS = (
    "ALTERNATION_MIX", "ALTERNATION_GATE_EVERY", "ALTERNATION_INIT", "ALTERNATION_LR_MULTIPLIER",
)  # fmt: skip
TUNED = ("LEARNING_RATES", "TUNING_SEEDS")
CHANGES_TRAINING = (*OPTIMIZER, *LEARNED_SETTINGS, *TUNED, "NUMERICS_FIX", "CONTINUES")
BUDGET = "a budget only sets the number of iterations, which the row schedule compares"
SPEED = "it changes speed and rounding, not the computed function"
ASIDE = "it changes no training step"
GRPO = (
    "GRPO", "GRPO_MODEL", "GRPO_TRAIN_FILE", "GRPO_TEST_FILE", "GRPO_ARMS", "GRPO_EPOCHS", "GRPO_MAX_STEPS",
    "GRPO_PROMPTS", "GRPO_GROUP", "GRPO_MICRO_BATCH", "GRPO_RESPONSE_TOKENS", "GRPO_LEARNING_RATE",
    "GRPO_EVALUATE_STEPS", "GRPO_EVALUATE_LIMIT", "GRPO_EVALUATE_BATCH", "GRPO_CHECKPOINT_STEPS", "GRPO_MARGIN_POINTS",
)  # fmt: skip
PLACES = "it chooses where runs execute and how many at once, not their numbers"
WITHOUT_EFFECT = {
    **dict.fromkeys(LIMITS, BUDGET), "BUDGET_EQUAL_TIME": BUDGET,
    "GPT2_HARD_LIMIT": "it only cuts runs short, which the row schedule shows",
    "EQUIVALENCE_MARGIN_PERCENT": "it changes a study's verdicts, not its losses",
    "COMPILE": SPEED, "CPU_THREADS": SPEED, "DETERMINISTIC": SPEED, "RANKS": SPEED,
    "RANKS_TIMEOUT": SPEED,
    "ALTERNATION_RECOMPUTE": "it changes speed and memory; the numbers are the same to the bit",
    "DATA_WORKERS": ASIDE, "EVAL_INTERVAL_TOKENS": ASIDE, "CHECKPOINT_SECONDS": ASIDE, "HELLASWAG": ASIDE,
    "HELLASWAG_FILE": ASIDE, "HELLASWAG_LIMIT": ASIDE, "WANDB": ASIDE, "WANDB_MODE": ASIDE, "WANDB_PROJECT": ASIDE,
    "EVAL_SETS": ASIDE, "TENSORBOARD": ASIDE, "MONITOR": ASIDE, "MONITOR_TARGETS": ASIDE,
    "MONITOR_INTERVAL": ASIDE,
    "MONITOR_TRIGGERS": ASIDE, "MONITOR_FULL_STEPS": ASIDE,
    **dict.fromkeys(GRPO, "it is of make grpo alone"),
    "SLOTS": PLACES, "EXECUTOR": PLACES, "SLURM_OPTIONS": PLACES, "RAY_ADDRESS": PLACES,
}  # fmt: skip
LEARNED_PREFIX = "ALTERNATION_"


class Recorded(Protocol):
    """One side of the checklist: its runs, their variants and seeds, and their settings by run and symbol."""

    @property
    def used(self) -> Sequence[Run]: ...

    @property
    def variants(self) -> Sequence[str]: ...

    @property
    def seeds(self) -> set[int]: ...

    @property
    def configs(self) -> Mapping[str, Mapping[str, str] | None]: ...


def checklist(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Check every entry, in the order of the groups."""
    checks = [_common("variants", [set(study.variants) for study in studies])]
    checks.append(_common("seeds", [study.seeds for study in studies]))
    checks += [check for rule in RULES if (check := _apply(rule, studies))]
    checks += [*_settings(studies), *_variables(studies), *_code(studies)]
    order = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: order.index(check.group))


def _common(kind: str, sets: Sequence[set[Any]]) -> ChecklistRow:
    """Compare the variants or the seeds of the studies."""
    texts = [{", ".join(map(str, sorted(names))) or "none"} for names in sets]
    if set.intersection(*sets):
        return compare_values("study", kind, texts, HARMLESS, "only the common ones are compared")
    return compare_values("study", kind, texts, FATAL, f"the studies share no {kind.rstrip('s')}")


def _apply(rule: EntryRule, studies: Sequence[Recorded]) -> ChecklistRow | None:
    """Compare the keys (seeds or variants) that all studies have. A study with several values is equal to no other."""
    found: list[dict[str, set[str]]] = []  # of each study: key -> values
    for study in studies:
        table: dict[str, set[str]] = {}
        for run in study.used:
            value = rule.read(run.record)
            key = {"seed": f"seed {run.seed}", "variant": run.variant}.get(rule.by, "")
            table.setdefault(key, set()).add(NOT_RECORDED if value is None else str(value))
        found.append(table)
    every = set().union(*(values for table in found for values in table.values()))
    shared = set.intersection(*(set(table) for table in found))
    differing = {
        key for key in shared if len(set.union(*(table[key] for table in found)) - {NOT_RECORDED}) > 1
    }
    values = tuple(_shown(table, differing or set(table)) for table in found)
    if rule.optional and every == {NOT_RECORDED}:
        return None
    if differing:
        return ChecklistRow(
            rule.group, rule.subject, rule.severity, values, rule.reason, rule.severity == FATAL
        )
    if NOT_RECORDED in every:
        blocks = rule.severity == FATAL and rule.unknown_blocks
        reason = "agreement cannot be shown" if blocks else rule.unknown
        return ChecklistRow(rule.group, rule.subject, NOT_RECORDED, values, reason, blocks)
    # Without a common key, the row of the keys reports it.
    return ChecklistRow(rule.group, rule.subject, EQUAL, values, "", False) if shared else None


def _shown(table: dict[str, set[str]], keys: set[str]) -> str:
    texts = {key: " and ".join(sorted(table[key])) for key in sorted(keys & table.keys())}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{key} {text}".strip() for key, text in texts.items()) or "-"


def _settings(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare each symbol of the saved settings that no rule covers, and the hash of the schedule."""
    group, checks = "hyper-parameters", []
    learned = all(LEARNED in study.variants for study in studies)
    configs = [list(study.configs.values()) for study in studies]
    if all(config is not None for study in configs for config in study):
        tables = [[_values(config or {}) for config in study] for study in configs]
        checks += compare_tables(group, tables, lambda name: _meaning(name, learned))
        if any(check.status != EQUAL and check.subject in HASHED for check in checks):
            return checks  # they explain the hash
        reason = "it differs although its saved settings agree: the runs ran with other settings"
    else:
        reason = "the differing setting is unknown: saved settings are missing or unreadable"
        if learned:
            values = tuple("recorded" if all(study) else NOT_RECORDED for study in configs)
            unknown = f"agreement of the settings of {LEARNED} cannot be shown"
            checks.append(ChecklistRow(group, f"{LEARNED_PREFIX}*", NOT_RECORDED, values, unknown, True))
    rule = EntryRule(
        group, "optimizer and budget (hash)", lambda record: record.fingerprint.schedule[:12], FATAL, reason
    )
    return [*checks, *filter(None, [_apply(rule, studies)])]


def _values(config: Mapping[str, str]) -> dict[str, str]:
    """Return symbol -> value. An absent symbol is off, or hidden because its parent is off."""
    return {
        name: NOT_SET if value == "n" else value or '""'
        for name, value in config.items()
        if name not in COVERED
    }


def _meaning(name: str, learned: bool) -> tuple[str, str]:
    """Return the severity of a differing symbol and the reason. learned: whether all studies have LEARNED."""
    if name in WITHOUT_EFFECT:
        return HARMLESS, WITHOUT_EFFECT[name]
    if name.startswith(LEARNED_PREFIX):
        if learned:
            return FATAL, f"{LEARNED} differs between the studies"
        return HARMLESS, f"it affects {LEARNED} alone, which not all studies have"
    return FATAL, "a setting of training differs"


def _variables(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare each environment variable that any run has."""
    group, subject = "environment", "environment variables"
    tables = [
        [{name: str(value) for name, value in run.record.environment.variables.items()} for run in study.used]
        for study in studies
    ]
    checks = compare_tables(group, tables, _variable_meaning)
    return checks or [compare_values(group, subject, [{"none set"} for _ in studies], EQUAL, "")]


def _variable_meaning(name: str) -> tuple[str, str]:
    changes = VARIABLES.get(name, FORMAT)
    return FATAL if changes in (FORMAT, SATURATION) else HARMLESS, f"it changes {changes}"


def _code(studies: Sequence[Recorded]) -> list[ChecklistRow]:
    """Compare the sources of each variant that a user wrote. Other ones are excluded alone, if variants remain."""
    shared = sorted(set.intersection(*(set(study.variants) for study in studies)))
    checks = {name: check for name in shared if (check := _source(name, studies))}
    remain = any(name not in checks or checks[name].status == EQUAL for name in shared)
    return [
        dataclasses.replace(check, blocks=False, excludes=name) if check.blocks and remain else check
        for name, check in checks.items()
    ]


def _source(name: str, studies: Sequence[Recorded]) -> ChecklistRow | None:
    """Compare the modules of ra.custom that the runs of a variant had loaded; None where they had none."""
    sources = [
        {_modules(run.record.environment) for run in study.used if run.variant == name} for study in studies
    ]
    if set.union(*sources) == {""}:
        return None
    return compare_values(
        "code", f"source of {name}", sources, FATAL, "the variant may compute something else"
    )


def _modules(environment: Environment) -> str:
    return ", ".join(f"{module} {str(digest)[:6]}" for module, digest in environment.code.items())
