"""The settings of a run, a field a symbol of .config, and the checks of values that depend on each other.

Kconfig holds the defaults. `study.study_settings` has the symbols of the study.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from referee.errors import NumericsError
from referee.numerics.monitor.targets import parse_targets, parse_triggers
from runtime.batch_plan import micro_batches, nearest
from runtime.declared_symbols import Symbol, read, symbols_of
from runtime.dotconfig import Symbols, read_symbols, split_words


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer (gpt2.tokenizer). size: with the end of text, which is the last id."""

    name: str
    size: int

    @property
    def padded(self) -> int:
        """Return the next multiple of 128, which matrix units need."""
        return -(-self.size // 128) * 128


GPT2 = Vocabulary("gpt2", 50257)
BYTES = Vocabulary("bytes", 257)
VOCABULARIES = {"gpt2": GPT2, "bytes": BYTES}


OF_EVERY_RUN = ("validation", "hellaswag", "choice")  # names of data that rows of results have already
WIKITEXT = "wikitext-2"  # the set whose text and treatment are known by its name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class EvalSet:
    """A held-out text. pattern: a file or a glob; "": the text that the name means, from the hub."""

    name: str
    pattern: str = ""


def eval_sets(symbols: Symbols) -> tuple[EvalSet, ...]:
    """Return the sets in their order.

    ConfigError for a name of another form, a name twice, and an unknown name without a file.
    """
    found: dict[str, EvalSet] = {}
    for word in split_words(symbols.text("EVAL_SETS")):
        name, equals, pattern = word.partition("=")
        if not NAME.fullmatch(name) or name in OF_EVERY_RUN:
            raise symbols.error(
                "EVAL_SETS",
                f"has the name {name!r}; fix: NAME=FILE with at most 40 letters, digits, . _ and - in NAME, which is "
                f"none of {', '.join(OF_EVERY_RUN)}",
            )
        if name in found:
            raise symbols.error(
                "EVAL_SETS",
                f"has the name {name!r} twice; fix: one name for each text; a glob takes several files",
            )
        if not pattern and (equals or name != WIKITEXT):
            raise symbols.error(
                "EVAL_SETS",
                f"has {word!r} without a file; fix: {name}=FILE (only {WIKITEXT} is known without one)",
            )
        found[name] = EvalSet(name, pattern)
    return tuple(found.values())


@dataclass(frozen=True)
class MonitorSettings:
    """The monitoring of a run. No fingerprint contains it: no number of a run depends on it.

    targets: see referee.numerics.monitor.targets, every `interval` steps. triggers: see gpt2.watch; one of them turns
    everything on for `full_steps` steps.
    """

    enabled: Annotated[bool, Symbol("MONITOR", "free")] = False
    interval: Annotated[int, Symbol("MONITOR_INTERVAL", "free", needs="MONITOR")] = 10
    targets: Annotated[tuple[str, ...], Symbol("MONITOR_TARGETS", "free", needs="MONITOR")] = ()
    triggers: Annotated[tuple[str, ...], Symbol("MONITOR_TRIGGERS", "free", needs="MONITOR")] = ()
    full_steps: Annotated[int, Symbol("MONITOR_FULL_STEPS", "free", needs="MONITOR")] = 20

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> MonitorSettings:
        settings = read(cls, symbols)
        for name, words, parse in (
            ("MONITOR_TARGETS", settings.targets, parse_targets),
            ("MONITOR_TRIGGERS", settings.triggers, parse_triggers),
        ):
            try:
                parse(words)
            except NumericsError as error:
                raise symbols.error(name, f"cannot be used: {error}") from error
        return settings


NOT_MONITORED = MonitorSettings()


WORD = re.compile(r"(cpu|upcast|small):.+")


def numerics_fix(symbols: Symbols) -> str:
    """Return the words, separated by blanks.

    ConfigError for a word of another form.
    """
    words = symbols.text("NUMERICS_FIX").split()
    for word in words:
        if not WORD.fullmatch(word):
            raise symbols.error(
                "NUMERICS_FIX",
                f"has {word!r}, which is not a fix; fix: use KIND:PATTERN with KIND cpu, upcast or small",
            )
    return " ".join(words)


MODELS = {  # layers, heads and width: GPT-2's four published sizes, and three smaller ones
    "tiny": (2, 2, 64),
    "mini": (4, 4, 128),
    "small": (6, 6, 384),
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1558m": (48, 25, 1600),
}
TARGETS = {
    "TARGET_AUTO": "auto",
    "TARGET_A100_40G": "a100-40g",
    "TARGET_A100_80G": "a100-80g",
    "TARGET_H100": "h100",
    "TARGET_H200": "h200",
    "TARGET_W7900": "w7900",
    "TARGET_RTX4090": "rtx4090",
    "TARGET_MI300X": "mi300x",
    "TARGET_910B": "910b",
    "TARGET_910C": "910c",
    "TARGET_CPU": "cpu",
}
MIXES = {"ALTERNATION_MIX_OUTPUT": "output", "ALTERNATION_MIX_SCORE": "score", "ALTERNATION_MIX_HARD": "hard"}
SCHEDULES = {"SCHEDULE_COSINE": "cosine", "SCHEDULE_WSD": "wsd"}
DTYPES = {"DTYPE_AUTO": "auto", "DTYPE_FLOAT32": "float32", "DTYPE_BFLOAT16": "bfloat16"}
TOKENIZERS = {"TOKENIZER_GPT2": GPT2.name, "TOKENIZER_BYTES": BYTES.name}
DATASETS = {
    "DATASET_EMBEDDED": "embedded",
    "DATASET_FINEWEB_EDU": "fineweb-edu",
    "DATASET_OPENWEBTEXT": "openwebtext",
    "DATASET_TINYSTORIES": "tinystories",
    "DATASET_WIKITEXT103": "wikitext103",
    "DATASET_LOCAL": "files",
}
# Parameters x tokens that a core trains in a second. A micro-batch with fewer is small: a CPU trains more with a run a
# core than with one run on all cores. mini (4.4e8) takes 38 ms with one thread of an AMD EPYC and 23 ms with two, so
# 8 ms do not divide. In a step of a second they take a tenth of the time of 16 cores.
CORE_WORK = 1e10
MICRO_TOKENS = {"cpu": 4096, "gpu": 65536}  # tokens of a micro-batch beyond which a step is no faster


SIZES = {f"GPT2_MODEL_{name.upper()}": name for name in (*MODELS, "custom")}


@dataclass(frozen=True)
class ModelConfig:
    """One of MODELS, or "custom". block_size: tokens of a sequence. dropout: probability."""

    size: Annotated[str, Symbol("GPT2_MODEL_", "numbers", "model", members=SIZES)]
    layers: Annotated[int, Symbol("GPT2_LAYERS", "numbers", "model")]
    heads: Annotated[int, Symbol("GPT2_HEADS", "numbers", "model")]
    width: Annotated[int, Symbol("GPT2_WIDTH", "numbers", "model")]
    block_size: Annotated[int, Symbol("GPT2_BLOCK_SIZE", "numbers", "model")]
    dropout: Annotated[float, Symbol("GPT2_DROPOUT", "numbers", "model", "[0, 1)")]
    vocabulary: int = GPT2.size
    padded_vocabulary: int = GPT2.padded

    @property
    def parameters(self) -> int:
        """12 C^2 + 13 C a layer, the embeddings, the last norm; without those of a variant."""
        C = self.width
        return self.layers * (12 * C * C + 13 * C) + (self.padded_vocabulary + self.block_size + 2) * C

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> ModelConfig:
        """Read the settings. ConfigError where the heads of a custom model do not divide its width."""
        ids, size = VOCABULARIES[TOKENIZERS[symbols.choice(TOKENIZERS)]], SIZES[symbols.choice(SIZES)]
        shape = dict(zip(("layers", "heads", "width"), MODELS.get(size, ()), strict=False))
        model = read(cls, symbols, vocabulary=ids.size, padded_vocabulary=ids.padded, **shape)
        if not (model.layers and model.heads and model.width) or model.width % model.heads:
            raise symbols.error(
                "GPT2_WIDTH",
                f"is not a multiple of CONFIG_GPT2_HEADS={model.heads}; fix: use {64 * model.heads}",
            )
        return model


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per optimizer step, and per forward pass (micro 0: the planner chooses).

    The plan of a study fixes the micro-batch. Another study may have another; the difference is rounding.
    """

    effective: Annotated[int, Symbol("EFFECTIVE_BATCH", "numbers", "batch")]
    micro: Annotated[int, Symbol("MICRO_BATCH", "numbers", "batch")]

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> BatchConfig:
        batch, ranks = read(cls, symbols), symbols.integer("RANKS")
        effective, micro = batch.effective, batch.micro
        if effective < 1:
            raise symbols.error("EFFECTIVE_BATCH", "is not a batch; fix: use at least 1 sequence")
        if effective % ranks:
            raise symbols.error(
                "RANKS",
                f"does not divide CONFIG_EFFECTIVE_BATCH={effective}; fix: use "
                f"{nearest(micro_batches(effective, 1), ranks)}",
            )
        if micro and effective // ranks % micro:
            share = f"the {effective // ranks} sequences of a rank: " if ranks > 1 else ""
            fix = f"{nearest(micro_batches(effective, ranks), micro)}, or 0 to let the planner choose"
            if ranks > 1 and effective % micro == 0:  # a study's micro-batch does not change, its ranks may
                fix += f"; in an existing study use CONFIG_RANKS={nearest(micro_batches(effective // micro, 1), ranks)}"
            raise symbols.error(
                "MICRO_BATCH", f"does not divide {share}CONFIG_EFFECTIVE_BATCH={effective}; fix: use {fix}"
            )
        return batch


@dataclass(frozen=True)
class BudgetConfig:
    """Limits of a run, 0 for none. The first three set its number of iterations; at least one of them is set.

    hard_limit_seconds: of wall time, after which a run is cut.
    """

    max_time_seconds: Annotated[int, Symbol("GPT2_MAX_TIME", "numbers", "budget")]
    max_tokens: Annotated[int, Symbol("GPT2_MAX_TOKENS", "numbers", "budget")]
    max_iterations: Annotated[int, Symbol("GPT2_MAX_ITERS", "numbers", "budget")]
    hard_limit_seconds: Annotated[int, Symbol("GPT2_HARD_LIMIT", "free")] = 0

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> BudgetConfig:
        budget = read(cls, symbols)
        if not (budget.max_time_seconds or budget.max_tokens or budget.max_iterations):
            raise symbols.error(
                "GPT2_MAX_TIME",
                "and CONFIG_GPT2_MAX_TOKENS=0 and CONFIG_GPT2_MAX_ITERS=0 give no budget; set one above 0",
            )
        return budget

    @property
    def text(self) -> str:
        """The limits that set the number of iterations, such as "16 s of training or 100 iterations"."""
        limits = {
            "s of training": self.max_time_seconds,
            "tokens": self.max_tokens,
            "iterations": self.max_iterations,
        }
        return " or ".join(f"{limit} {unit}" for unit, limit in limits.items() if limit)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule. warmup_fraction, decay_fraction: of the budget. grad_clip: global norm, 0 for none.

    schedule: see gpt2.optimizer.learning_rate. Only "wsd" uses decay_fraction.
    """

    learning_rate: Annotated[float, Symbol("LEARNING_RATE", "numbers", "schedule", "(0, 1]")]
    min_learning_rate_ratio: Annotated[
        float, Symbol("MIN_LEARNING_RATE_RATIO", "numbers", "schedule", "[0, 1]")
    ]
    warmup_fraction: Annotated[float, Symbol("WARMUP_FRACTION", "numbers", "schedule", "[0, 1)")]
    weight_decay: Annotated[float, Symbol("WEIGHT_DECAY", "numbers", "schedule", "[0, 10]")]
    beta1: Annotated[float, Symbol("ADAM_BETA1", "numbers", "schedule", "[0, 1)")]
    beta2: Annotated[float, Symbol("ADAM_BETA2", "numbers", "schedule", "[0, 1)")]
    epsilon: Annotated[float, Symbol("ADAM_EPSILON", "numbers", "schedule", "(0, 1]")]
    grad_clip: Annotated[float, Symbol("GRAD_CLIP", "numbers", "schedule", "[0, inf)")]
    schedule: Annotated[str, Symbol("SCHEDULE_", "numbers", "schedule", members=SCHEDULES)] = "cosine"
    decay_fraction: Annotated[
        float, Symbol("DECAY_FRACTION", "numbers", "schedule", "(0, 1]", needs="SCHEDULE_WSD")
    ] = 0.0

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> OptimizerConfig:
        optimizer = read(cls, symbols)
        if optimizer.warmup_fraction + optimizer.decay_fraction > 1:
            raise symbols.error(
                "DECAY_FRACTION",
                f"and CONFIG_WARMUP_FRACTION={optimizer.warmup_fraction:g} are more than the budget; "
                "fix: use at most 1 together",
            )
        return optimizer


# setting of a recipe -> its interval
RECIPE_INTERVALS = {
    name: symbol.within
    for name, symbol in symbols_of(OptimizerConfig).items()
    if symbol.within and not symbol.needs
}


@dataclass(frozen=True)
class DataConfig:
    """The text's source. files: globs of the data set "files"; max_tokens 0: all; workers 0: all cores.

    tokenizer: a name of gpt2.tokenizer.
    """

    dataset: Annotated[str, Symbol("DATASET_", "numbers", "data", members=DATASETS)]
    files: Annotated[tuple[str, ...], Symbol("DATASET_FILES", "numbers", "data")]
    max_tokens: Annotated[int, Symbol("DATASET_MAX_TOKENS", "numbers", "data")]
    directory: Annotated[Path, Symbol("DATA_DIR", "free", "folder")]
    workers: Annotated[int, Symbol("DATA_WORKERS", "free")]
    tokenizer: Annotated[str, Symbol("TOKENIZER_", "numbers", "tokenizer", members=TOKENIZERS)] = GPT2.name

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> DataConfig:
        data, member = read(cls, symbols), symbols.choice(DATASETS)
        if data.files in (("y",), ("n",)):
            raise symbols.error(
                "DATASET_FILES", "takes file globs, not y or n; fix: use a glob such as texts/*.txt"
            )
        if member == "DATASET_LOCAL" and not data.files:
            raise symbols.error(
                member, "needs CONFIG_DATASET_FILES, which is empty; fix: use a glob such as texts/*.txt"
            )
        if member != "DATASET_LOCAL" and data.files:
            raise symbols.error(
                "DATASET_FILES",
                f"and CONFIG_{member}=y exclude each other; fix: remove one (CONFIG_DATASET_LOCAL=y uses files)",
            )
        return data


@dataclass(frozen=True)
class EvaluationConfig:
    """tokens: validation tokens per evaluation. interval_tokens: training tokens between them, 0: at the end only.

    sets: held-out texts, evaluated at the end.
    """

    tokens: Annotated[int, Symbol("EVAL_TOKENS", "numbers", "validation")]
    interval_tokens: Annotated[int, Symbol("EVAL_INTERVAL_TOKENS", "verdict")]
    hellaswag: Annotated[bool, Symbol("HELLASWAG", "verdict")]
    hellaswag_file: Annotated[Path | None, Symbol("HELLASWAG_FILE", "verdict", needs="HELLASWAG")] = None
    hellaswag_limit: Annotated[int, Symbol("HELLASWAG_LIMIT", "verdict", needs="HELLASWAG")] = 0
    sets: Annotated[tuple[EvalSet, ...], Symbol("EVAL_SETS", "verdict")] = ()

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> EvaluationConfig:
        evaluation, block_size = (
            read(cls, symbols, sets=eval_sets(symbols)),
            symbols.integer("GPT2_BLOCK_SIZE"),
        )
        if evaluation.tokens < block_size:
            raise symbols.error(
                "EVAL_TOKENS",
                f"is less than one sequence of CONFIG_GPT2_BLOCK_SIZE={block_size}; fix: use {block_size} or more",
            )
        return evaluation


@dataclass(frozen=True)
class TargetConfig:
    """The requested hardware. "auto": the machine of the study. detected: the hardware when .config was written.

    cpu_threads: of a run, in a `Config` 1 for small steps; 0: all physical cores.
    ranks: processes of a run, a card each.
    ranks_timeout_seconds: longest wait of a rank for another.
    """

    name: Annotated[str, Symbol("TARGET_", "numbers", "target", members=TARGETS)]
    dtype: Annotated[str, Symbol("DTYPE_", "numbers", "target", members=DTYPES)]
    compile: Annotated[bool, Symbol("COMPILE", "rounding")]
    cpu_threads: Annotated[int, Symbol("CPU_THREADS", "rounding")]
    detected: Annotated[str, Symbol("DETECTED", "numbers", "target")]
    # Kconfig leaves it out where it is n.
    scale_cpu: Annotated[bool, Symbol("SCALE_CPU", "numbers", "target", needs="SCALE_CPU")] = False
    deterministic: Annotated[bool, Symbol("DETERMINISTIC", "rounding")] = False
    ranks: Annotated[int, Symbol("RANKS", "rounding")] = 1
    ranks_timeout_seconds: Annotated[int, Symbol("RANKS_TIMEOUT", "free")] = 600
    bfloat16_residual: Annotated[
        bool, Symbol("RESIDUAL_BF16", "numbers", "target", needs="RESIDUAL_BF16")
    ] = False

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> TargetConfig:
        default = {} if symbols.integer("RANKS") > 1 else {"ranks_timeout_seconds": cls.ranks_timeout_seconds}
        return read(cls, symbols, detected=detected(symbols), **default)


# the hardware of this machine, for commands without a .config
ANY_TARGET = TargetConfig("auto", "auto", compile=False, cpu_threads=0, detected="auto", scale_cpu=False)


GRPO_NEEDS = {
    "GPT2_MAX_TIME": "0",
    "GPT2_MAX_TOKENS": "0",
    "RANKS": "1",
    "LEARNING_RATES": "",
    "CONTINUES": "",
}


@dataclass(frozen=True)
class GrpoConfig:
    """GRPO on problems with numbers as answers."""

    model: Annotated[str, Symbol("GRPO_MODEL", "numbers")]  # a folder, or a name on the hub
    train_file: Annotated[str, Symbol("GRPO_TRAIN_FILE", "numbers")]  # "": GSM8K of the hub
    test_file: Annotated[str, Symbol("GRPO_TEST_FILE", "numbers")]
    group: Annotated[int, Symbol("GRPO_GROUP", "numbers")]  # responses per problem
    response_tokens: Annotated[int, Symbol("GRPO_RESPONSE_TOKENS", "numbers")]  # at most
    evaluate_steps: Annotated[int, Symbol("GRPO_EVALUATE_STEPS", "verdict")]  # between two evaluations
    evaluate_limit: Annotated[int, Symbol("GRPO_EVALUATE_LIMIT", "verdict")]  # test problems; 0: all
    evaluate_batch: Annotated[int, Symbol("GRPO_EVALUATE_BATCH", "verdict")]  # test problems at once

    @property
    def files(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Each file of problems with its split."""
        return (self.train_file, "train"), (self.test_file, "test")

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> GrpoConfig | None:
        """Read the settings; None where the study trains GPT-2. ConfigError for values that exclude each other."""
        if not symbols.flag("GRPO"):
            return None
        group, responses = symbols.integer("GRPO_GROUP"), symbols.integer("EFFECTIVE_BATCH")
        if responses % group:
            raise symbols.error(
                "GRPO_GROUP",
                f"does not divide the CONFIG_EFFECTIVE_BATCH={responses} responses of a step; fix: use "
                f"{nearest(micro_batches(responses, 1), group)}",
            )
        for name, needed in GRPO_NEEDS.items():
            if symbols.entries[name].value != needed:
                fix = f"fix: CONFIG_{name}={needed}"
                raise symbols.error(name, f"and CONFIG_GRPO=y exclude each other; {fix}")
        return read(cls, symbols)


@dataclass(frozen=True)
class TrackingConfig:
    """Experiment loggers in processes beside the run. Without wandb its mode is "off" and its project ""."""

    wandb: Annotated[bool, Symbol("WANDB", "free")]
    wandb_mode: Annotated[str, Symbol("WANDB_MODE", "free", needs="WANDB")] = "off"
    wandb_project: Annotated[str, Symbol("WANDB_PROJECT", "free", needs="WANDB")] = ""
    tensorboard: Annotated[bool, Symbol("TENSORBOARD", "free")] = False

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> TrackingConfig:
        tracking = read(cls, symbols)
        if tracking.wandb and tracking.wandb_mode not in ("online", "offline"):
            raise symbols.error("WANDB_MODE", "is not a mode; fix: use online or offline")
        if tracking.wandb and not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", tracking.wandb_project):
            raise symbols.error("WANDB_PROJECT", "is not a project name; fix: use letters, digits, . _ and -")
        return tracking


@dataclass(frozen=True)
class AlternationSettings:
    """Settings of RALEARN.

    mix: the mixed quantity ("output", "score", "hard"). initial_probability: share of the reciprocal path, in (0, 1).
    learning_rate_multiplier: of the logits, relative to the rest of the model. recompute: recompute the attention
    calls in backward instead of storing their outputs. gate_every: steps between two gradients of the hard gate.
    """

    mix: Annotated[str, Symbol("ALTERNATION_MIX_", "numbers", members=MIXES)]
    initial_probability: Annotated[float, Symbol("ALTERNATION_INIT", "numbers", within="(0, 1)")]
    learning_rate_multiplier: Annotated[
        float, Symbol("ALTERNATION_LR_MULTIPLIER", "numbers", within="(0, 100000]")
    ]
    recompute: Annotated[bool, Symbol("ALTERNATION_RECOMPUTE", "rounding")] = False
    gate_every: Annotated[int, Symbol("ALTERNATION_GATE_EVERY", "numbers", needs="ALTERNATION_MIX_HARD")] = 1

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> AlternationSettings:
        """Read the settings. ConfigError where a value is out of range."""
        return read(cls, symbols)


@dataclass(frozen=True)
class Config:
    """The settings of a run. checkpoint_seconds: between checkpoints. sha256: of the symbols' values.

    numerics_fix: words of referee.numerics.fix.
    """

    model: ModelConfig
    batch: BatchConfig
    budget: BudgetConfig
    optimizer: OptimizerConfig
    data: DataConfig
    evaluation: EvaluationConfig
    target: TargetConfig
    tracking: TrackingConfig
    alternation: AlternationSettings
    checkpoint_seconds: Annotated[int, Symbol("CHECKPOINT_SECONDS", "free")]
    sha256: str
    numerics_fix: Annotated[str, Symbol("NUMERICS_FIX", "numbers")] = ""
    monitor: MonitorSettings = NOT_MONITORED
    # None: the runs train GPT-2
    grpo: Annotated[GrpoConfig | None, Symbol("GRPO", "numbers")] = None

    @property
    def small_step(self) -> bool:
        """Return whether a run has one thread on a CPU, on every machine alike: numbers depend on threads."""
        if self.grpo:
            return False
        micro = self.batch.micro * self.model.block_size
        tokens = micro or min(self.batch.effective * self.model.block_size, MICRO_TOKENS["cpu"])
        return self.model.parameters * tokens < CORE_WORK

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> Config:
        built = read(
            cls,
            symbols,
            sha256=symbols.sha256,
            numerics_fix=numerics_fix(symbols),
            grpo=GrpoConfig.from_symbols(symbols),
        )
        if built.target.cpu_threads or built.target.ranks > 1 or not built.small_step:
            return built
        return replace(built, target=replace(built.target, cpu_threads=1))


def load_config(path: Path | str) -> Config:
    """Load the .config at `path`. ConfigError names the first fault."""
    return Config.from_symbols(read_symbols(path))


def detected(symbols: Symbols) -> str:
    """Read the hardware that was detected when .config was written, a row of the target table."""
    name = symbols.text("DETECTED")
    if not re.fullmatch(r"[a-z0-9-]+", name):
        raise symbols.error(
            "DETECTED", "is not a hardware name; fix: use lower-case letters, digits and -, such as cpu"
        )
    return name
