"""The rows of the checklist as data: the entry of a record, and the meaning of a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ra.names import LEARNED
from study.compare.load import Member
from study.records.hellaswag_scores import scored_items

EQUAL, HARMLESS, FATAL, NOT_RECORDED = "equal", "harmless", "fatal", "not recorded"
NOT_SET = "not set"
Values = dict[str, str]  # key (a seed, a variant; "" where there is one value) -> value of a run


@dataclass(frozen=True)
class Rule:
    """One entry to compare. read: a run's values by key, None where its record lacks them. severity: of a difference.

    recent: older records lack the entry; the row is left out where no record has it.
    unknown: the reason shown where a harmless entry is not recorded.
    """

    group: str
    subject: str
    read: Callable[[Member], Values | None]
    severity: str
    reason: str
    recent: bool = False
    unknown: str = "only the losses can show a difference"


def fingerprint(entry: str) -> Callable[[Member], Values | None]:
    """An entry of the fingerprint, shortened."""
    return lambda member: _one(_short(getattr(member.record.fingerprint, entry)))


def _target(key: str) -> Callable[[Member], Values | None]:
    return lambda member: _one(getattr(member.record.target, key))


def _environment(*keys: str) -> Callable[[Member], Values | None]:
    """The first of the keys that has a value; "none" where the record has the environment and none of them."""

    def read(member: Member) -> Values | None:
        environment = member.record.environment
        if not environment:
            return None
        values = (getattr(environment, key) for key in keys)
        return {"": next((str(value) for value in values if value is not None), "none")}

    return read


def _triton(member: Member) -> Values | None:
    environment = member.record.environment
    return {"": environment.triton or "none"} if environment and environment.triton != "" else None


def _one(value: Any) -> Values | None:
    return None if value is None or value == NOT_RECORDED else {"": str(value)}


def _short(digest: str) -> str:
    """The first digits of a hash."""
    return digest if digest == NOT_RECORDED else digest[:12]


def _weights(member: Member) -> Values | None:
    value = member.record.fingerprint.initial_weights
    return None if value == NOT_RECORDED else {f"seed {member.run.seed}": _short(value)}


def _schedule(member: Member) -> Values | None:
    planned = member.record.schedule
    if not planned:
        return None
    done = member.record.progress.iterations
    warmup = f", {planned.warmup_iterations:,} of warm-up" if planned.warmup_iterations is not None else ""
    return {member.run.variant: f"{done:,} of {planned.iterations:,} iterations{warmup}"}


def _parameters(member: Member) -> Values | None:
    count = member.record.parameters
    return None if count is None else {member.run.variant: f"{count:,}"}


def _batch(*keys: str) -> Callable[[Member], Values | None]:
    return lambda member: {"": " x ".join(f"{getattr(member.record.batch, key):,}" for key in keys)}


def _hellaswag(member: Member) -> Values | None:
    items = scored_items(member.record)
    if items is None:
        return _one("not scored")
    return _one(str(items)) if items.sha256 else None


VERSION = "another version may use other kernels and another order of sums; the computed function is the same"
RULES = (
    Rule("data", "data", fingerprint("data"), FATAL, "the runs trained on different text"),
    Rule("data", "tokenizer", fingerprint("tokenizer"), FATAL, "losses per token refer to different tokens"),
    Rule("data", "validation set", fingerprint("validation"), FATAL, "losses refer to different text"),
    Rule("data", "HellaSwag items", _hellaswag, HARMLESS,
        "losses do not depend on them; HellaSwag accuracies refer to different questions: do not compare them",
        unknown="losses do not depend on them; whether HellaSwag accuracies refer to the same questions is unknown"),
    Rule("model", "model", fingerprint("model"), FATAL, "size, block size or dropout differ"),
    Rule("model", "parameters", _parameters, FATAL, "the variants are different models"),
    Rule("model", "initial weights", _weights, FATAL, "one seed gives different initial weights"),
    Rule("batch", "effective batch", _batch("effective"), FATAL,
        "an optimizer step averages over a different number of sequences"),
    Rule("batch", "sequence length", _batch("block_size"), FATAL, "the context lengths differ"),
    Rule("batch", "micro-batch x accumulation x processes", _batch("micro", "accumulation", "world_size"), HARMLESS,
        "the gradient is a mean over the same sequences however they are split; only rounding differs"),
    Rule("schedule", "schedule", _schedule, FATAL,
        "the learning rate is a function of iteration / planned iterations: the runs end at different points of it"),
    Rule("precision", "precision", _target("dtype"), FATAL, "the number formats differ"),
    Rule("precision", "float32 products", _environment("float32_matmul"), FATAL,
        "torch's setting: TF32 keeps 10 bits of a float32's 23"),
    Rule("precision", "attention backend", _target("attention_backend"), HARMLESS,
        "every backend computes exact softmax attention; the order of sums differs"),
    Rule("machine", "device", _target("device"), HARMLESS, "rounding differs between cards; times and memory too"),
    Rule("machine", "driver", lambda member: {"": member.record.target.driver or "none"}, HARMLESS, VERSION),
    Rule("machine", "CUDA or ROCm", _environment("cuda", "rocm"), HARMLESS, VERSION),
    Rule("machine", "cuDNN or MIOpen", _environment("cudnn"), HARMLESS, VERSION),
    Rule("machine", "CPU threads", _environment("threads"), HARMLESS, "sums are split among threads: rounding only"),
    Rule("machine", "platform", _environment("platform"), HARMLESS, VERSION),
    Rule("libraries", "torch", _target("torch"), HARMLESS, VERSION),
    Rule("libraries", "triton", _triton, HARMLESS, "it compiles kernels: " + VERSION, recent=True),
    Rule("libraries", "numpy", _environment("numpy"), HARMLESS,
        "it shuffles the batches: if the order changed, the losses part at the first step"),
    Rule("libraries", "python", _environment("python"), HARMLESS, "the text it prepares is compared under data"),
    Rule("code", "commit", lambda member: _one(member.record.commit and member.record.commit[:12]), HARMLESS,
        "the rows on code show the differences"),
    Rule("code", "uncommitted changes",
        lambda member: None if member.record.dirty is None else _one("yes" if member.record.dirty else "no"),
        HARMLESS, "the rows on code show the differences"),
)  # fmt: skip

# Each Kconfig symbol (for a choice in study.compare.load.CHOICES, the choice) is in one of the tables below. A symbol
# in none of them, from another version of this project, is fatal where it differs.

# Settings that the rows above cover, or that only name things. SCHEDULE_WSD is the opposite of SCHEDULE_COSINE; studies
# from before that choice have neither.
COVERED = (
    "DATASET_EMBEDDED", "DATASET_FILES", "DATASET_FINEWEB_EDU", "DATASET_LOCAL", "DATASET_MAX_TOKENS",
    "DATASET_OPENWEBTEXT", "DATASET_TINYSTORIES", "DATASET_WIKITEXT103", "DATA_DIR", "DETECTED", "DTYPE",
    "EFFECTIVE_BATCH", "EVAL_TOKENS", "GPT2_BLOCK_SIZE", "GPT2_DROPOUT", "GPT2_MODEL", "MICRO_BATCH", "RESULTS_DIR",
    "SCALE_CPU", "SCHEDULE_COSINE", "SEEDS", "STUDY_NAME", "TARGET", "TARGET_DETECTED_CPU", "VARIANTS",
)  # fmt: skip
OPTIMIZER = (
    "LEARNING_RATE", "MIN_LEARNING_RATE_RATIO", "WARMUP_FRACTION", "DECAY_FRACTION", "SCHEDULE_WSD", "WEIGHT_DECAY",
    "ADAM_BETA1", "ADAM_BETA2", "ADAM_EPSILON", "GRAD_CLIP",
)  # fmt: skip
LIMITS = ("GPT2_MAX_TIME", "GPT2_MAX_TOKENS", "GPT2_MAX_ITERS")
HASHED = (*OPTIMIZER, *LIMITS)  # all settings in the fingerprint's hash of the schedule
LEARNED_SETTINGS = (
    "ALTERNATION_MIX", "ALTERNATION_GATE_EVERY", "ALTERNATION_INIT", "ALTERNATION_LR_MULTIPLIER",
)  # fmt: skip
CHANGES_TRAINING = (*OPTIMIZER, *LEARNED_SETTINGS)
BUDGET = "a budget only sets the number of iterations, which the row schedule compares"
FORMER = ("BUDGET_EQUAL_TOKENS",)  # symbols of older studies
SPEED = "it changes speed and rounding, not the computed function"
ASIDE = "it changes no training step"
WITHOUT_EFFECT = {
    **dict.fromkeys(LIMITS, BUDGET), "BUDGET_EQUAL_TIME": BUDGET, **dict.fromkeys(FORMER, BUDGET),
    "GPT2_HARD_LIMIT": "it only cuts runs short, which the row schedule shows",
    "EQUIVALENCE_MARGIN_PERCENT": "it changes a study's verdicts, not its losses",
    "COMPILE": SPEED, "CPU_THREADS": SPEED,
    "ALTERNATION_RECOMPUTE": "it changes speed and memory; the numbers are the same to the bit",
    "DATA_WORKERS": ASIDE, "EVAL_INTERVAL_TOKENS": ASIDE, "CHECKPOINT_SECONDS": ASIDE, "HELLASWAG": ASIDE,
    "HELLASWAG_FILE": ASIDE, "HELLASWAG_LIMIT": ASIDE, "WANDB": ASIDE, "WANDB_MODE": ASIDE, "WANDB_PROJECT": ASIDE,
    "TRACKIO": ASIDE,
}  # fmt: skip
LEARNED_PREFIX = "ALTERNATION_"

# Changes of code that changed the numbers of one variant only: variant -> module -> its last digest before the change.
# They are in no fingerprint, because a study excludes runs with another fingerprint than its baseline.
NUMBER_CHANGES = {LEARNED: {"ra.attention": "6263fc97ba25014b"}}  # the mix, see docs/results/README.md
