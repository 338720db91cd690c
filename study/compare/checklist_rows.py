"""The rows of the checklist as data: the entry of a record, and the meaning of a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ra.arms import split_rate
from referee.numerics.setup.checklist_rows import FATAL, HARMLESS, NOT_RECORDED
from runtime.run_record import Environment
from study.records.hellaswag_scores import TASKS, EndingsTask, scored_items
from study.records.integrity import FinishedRecord

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

# Each Kconfig symbol (for a choice in study.compare.load.CHOICES, the choice) is in one of the tables below. A symbol
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
