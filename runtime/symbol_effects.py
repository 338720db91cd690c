"""What each symbol of Kconfig changes: refusals, comparisons and docs/configuration.md derive from it.

numbers: those of a run. In a study that has runs a change is refused.
rounding: may differ between machines and between runs; recorded, and allowed.
verdict: what is measured and judged, not how a run trains. In a study that has runs a change is refused.
free: place, speed of the driver and names; not a bit of a run.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Effect = Literal["numbers", "rounding", "verdict", "free"]


class Declaration(NamedTuple):
    """entry: of a run's record that holds the values or a digest of them; "" for none."""

    effect: Effect
    entry: str


# A word that ends with _ is the start of all symbols of a choice or of a group.
SYMBOLS: dict[tuple[Effect, str], str] = {
    ("numbers", "model"): "GPT2_MODEL_ GPT2_LAYERS GPT2_HEADS GPT2_WIDTH GPT2_BLOCK_SIZE GPT2_DROPOUT",
    ("numbers", "data"): "DATASET_",
    ("numbers", "tokenizer"): "TOKENIZER_",
    ("numbers", "validation"): "EVAL_TOKENS",
    # The first plan fixes the micro-batch. Another study may have another one: that is rounding.
    ("numbers", "batch"): "EFFECTIVE_BATCH MICRO_BATCH",
    ("numbers", "target"): "DETECTED SCALE_CPU TARGET_ DTYPE_",
    ("numbers", "schedule"): "LEARNING_RATE MIN_LEARNING_RATE_RATIO WARMUP_FRACTION SCHEDULE_ DECAY_FRACTION "
    "WEIGHT_DECAY ADAM_BETA1 ADAM_BETA2 ADAM_EPSILON GRAD_CLIP",
    ("numbers", "budget"): "GPT2_MAX_TIME GPT2_MAX_TOKENS GPT2_MAX_ITERS",
    ("numbers", "start"): "CONTINUES",
    ("numbers", "plan"): "BUDGET_EQUAL_TIME",
    ("numbers", ""): "ALTERNATION_MIX_ ALTERNATION_GATE_EVERY ALTERNATION_INIT ALTERNATION_LR_MULTIPLIER "
    "LEARNING_RATES TUNING_SEEDS NUMERICS_FIX GRPO GRPO_MODEL GRPO_TRAIN_FILE GRPO_TEST_FILE "
    "GRPO_GROUP GRPO_RESPONSE_TOKENS",
    # SLOTS: runs at once share the cores where CPU_THREADS is 0.
    ("rounding", ""): "COMPILE CPU_THREADS SLOTS RANKS DETERMINISTIC ALTERNATION_RECOMPUTE",
    ("verdict", "design"): "SEEDS VARIANTS PRIMARY",  # seeds and variants may be added
    ("verdict", "study"): "STUDY_NAME",  # plan.json has it
    (
        "verdict",
        "",
    ): "FIRST_SEED EQUIVALENCE_MARGIN_PERCENT EVAL_INTERVAL_TOKENS EVAL_SETS HELLASWAG HELLASWAG_FILE "
    "HELLASWAG_LIMIT GRPO_EVALUATE_STEPS GRPO_EVALUATE_LIMIT GRPO_EVALUATE_BATCH",
    ("free", "folder"): "DATA_DIR RESULTS_DIR",
    ("free", ""): "CHECKPOINT_SECONDS DATA_WORKERS GPT2_HARD_LIMIT RANKS_TIMEOUT "
    "EXECUTOR_ SLURM_OPTIONS RAY_ADDRESS WANDB WANDB_MODE WANDB_PROJECT TENSORBOARD "
    "MONITOR MONITOR_TARGETS MONITOR_INTERVAL MONITOR_TRIGGERS MONITOR_FULL_STEPS",
}
WORDS = {word: Declaration(*key) for key, words in SYMBOLS.items() for word in words.split()}


def declared(name: str) -> Declaration:
    """Return the declaration of a symbol, or of a choice by its start. An unknown symbol may change numbers."""
    starts = (word for word in WORDS if word.endswith("_") and f"{name}_".startswith(word))
    return WORDS.get(name) or WORDS.get(next(starts, ""), Declaration("numbers", ""))
