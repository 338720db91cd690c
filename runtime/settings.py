"""Convert a strictly parsed .config to frozen dataclasses. Checks the ranges of floats, which Kconfig lacks.

Kconfig holds the defaults. `study.study_settings` reads the symbols of the study.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from referee.errors import NumericsError
from referee.numerics.monitor.targets import parse_targets, parse_triggers
from runtime.batch_plan import micro_batches, nearest
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
TOKENIZERS = {"TOKENIZER_GPT2": GPT2, "TOKENIZER_BYTES": BYTES}


def vocabulary(symbols: Symbols) -> Vocabulary:
    """Read the tokenizer."""
    return TOKENIZERS[symbols.choice(TOKENIZERS)]


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

    targets: see referee.numerics.monitor.monitor_settings, every `interval` steps. triggers: see
    referee.numerics.monitor.monitor_settings; one of them turns everything on for `full_steps` steps.
    """

    enabled: bool = False
    interval: int = 10
    targets: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    full_steps: int = 20

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> MonitorSettings:
        if not symbols.flag("MONITOR"):
            return cls()
        words = {name: split_words(symbols.text(f"MONITOR_{name}")) for name in ("TARGETS", "TRIGGERS")}
        for name, parse in (("TARGETS", parse_targets), ("TRIGGERS", parse_triggers)):
            try:
                parse(words[name])
            except NumericsError as error:
                raise symbols.error(f"MONITOR_{name}", f"cannot be used: {error}") from error
        return cls(
            enabled=True,
            interval=symbols.integer("MONITOR_INTERVAL"),
            targets=words["TARGETS"],
            triggers=words["TRIGGERS"],
            full_steps=symbols.integer("MONITOR_FULL_STEPS"),
        )


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


# symbol -> (name, layers, heads, width): GPT-2's four published sizes, and three smaller ones
MODELS = {
    "GPT2_MODEL_TINY": ("tiny", 2, 2, 64),
    "GPT2_MODEL_MINI": ("mini", 4, 4, 128),
    "GPT2_MODEL_SMALL": ("small", 6, 6, 384),
    "GPT2_MODEL_124M": ("124m", 12, 12, 768),
    "GPT2_MODEL_350M": ("350m", 24, 16, 1024),
    "GPT2_MODEL_774M": ("774m", 36, 20, 1280),
    "GPT2_MODEL_1558M": ("1558m", 48, 25, 1600),
}
CUSTOM_MODEL = "GPT2_MODEL_CUSTOM"  # layers, heads and width of symbols of their own
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
OPTIMIZER_NUMBERS = {  # field of OptimizerConfig -> symbol, interval
    "learning_rate": ("LEARNING_RATE", "(0, 1]"),
    "min_learning_rate_ratio": ("MIN_LEARNING_RATE_RATIO", "[0, 1]"),
    "warmup_fraction": ("WARMUP_FRACTION", "[0, 1)"),
    "weight_decay": ("WEIGHT_DECAY", "[0, 10]"),
    "beta1": ("ADAM_BETA1", "[0, 1)"),
    "beta2": ("ADAM_BETA2", "[0, 1)"),
    "epsilon": ("ADAM_EPSILON", "(0, 1]"),
    "grad_clip": ("GRAD_CLIP", "[0, inf)"),
}
MIXES = {"ALTERNATION_MIX_OUTPUT": "output", "ALTERNATION_MIX_SCORE": "score", "ALTERNATION_MIX_HARD": "hard"}
SCHEDULES = {"SCHEDULE_COSINE": "cosine", "SCHEDULE_WSD": "wsd"}
DTYPES = {"DTYPE_AUTO": "auto", "DTYPE_FLOAT32": "float32", "DTYPE_BFLOAT16": "bfloat16"}
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


@dataclass(frozen=True)
class ModelConfig:
    """One of MODELS, or "custom". block_size: tokens of a sequence. dropout: probability."""

    size: str
    layers: int
    heads: int
    width: int
    block_size: int
    dropout: float
    vocabulary: int = GPT2.size
    padded_vocabulary: int = GPT2.padded

    @property
    def parameters(self) -> int:
        """12 C^2 + 13 C a layer, the embeddings, the last norm; without those of a variant."""
        C = self.width
        return self.layers * (12 * C * C + 13 * C) + (self.padded_vocabulary + self.block_size + 2) * C

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> ModelConfig:
        block_size, dropout = symbols.integer("GPT2_BLOCK_SIZE"), symbols.number("GPT2_DROPOUT", "[0, 1)")
        ids = vocabulary(symbols)
        chosen = symbols.choice((*MODELS, CUSTOM_MODEL))
        size = _custom_size(symbols) if chosen == CUSTOM_MODEL else MODELS[chosen]
        return cls(*size, block_size, dropout, ids.size, ids.padded)


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per optimizer step, and per forward pass (micro 0: the planner chooses)."""

    effective: int
    micro: int

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> BatchConfig:
        effective, micro = symbols.integer("EFFECTIVE_BATCH"), symbols.integer("MICRO_BATCH")
        ranks = symbols.integer("RANKS")
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
        return cls(effective, micro)


@dataclass(frozen=True)
class BudgetConfig:
    """Limits of a run, 0 for none. The first three set its number of iterations; at least one of them is set.

    hard_limit_seconds: of wall time, after which a run is cut.
    """

    max_time_seconds: int
    max_tokens: int
    max_iterations: int
    hard_limit_seconds: int = 0

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> BudgetConfig:
        names = ("GPT2_MAX_TIME", "GPT2_MAX_TOKENS", "GPT2_MAX_ITERS")
        seconds, tokens, iterations = (symbols.integer(name) for name in names)
        if not (seconds or tokens or iterations):
            raise symbols.error(
                names[0],
                "and CONFIG_GPT2_MAX_TOKENS=0 and CONFIG_GPT2_MAX_ITERS=0 give no budget; set one above 0",
            )
        return cls(seconds, tokens, iterations, symbols.integer("GPT2_HARD_LIMIT"))

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

    learning_rate: float
    min_learning_rate_ratio: float
    warmup_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    grad_clip: float
    schedule: str = "cosine"
    decay_fraction: float = 0.0

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> OptimizerConfig:
        schedule = SCHEDULES[symbols.choice(SCHEDULES)]
        warmup_fraction = symbols.number(*OPTIMIZER_NUMBERS["warmup_fraction"])
        decay_fraction = 0.0
        if schedule == "wsd":
            decay_fraction = symbols.number("DECAY_FRACTION", "(0, 1]")
            if warmup_fraction + decay_fraction > 1:
                raise symbols.error(
                    "DECAY_FRACTION",
                    f"and CONFIG_WARMUP_FRACTION={warmup_fraction:g} are more than the budget; "
                    "fix: use at most 1 together",
                )
        numbers = {
            field: symbols.number(symbol, interval) for field, (symbol, interval) in OPTIMIZER_NUMBERS.items()
        }
        return cls(**numbers, schedule=schedule, decay_fraction=decay_fraction)


@dataclass(frozen=True)
class DataConfig:
    """The text's source. files: globs of the data set "files"; max_tokens 0: all; workers 0: all cores.

    tokenizer: a name of gpt2.tokenizer.
    """

    dataset: str
    files: tuple[str, ...]
    max_tokens: int
    directory: Path
    workers: int
    tokenizer: str = GPT2.name

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> DataConfig:
        member = symbols.choice(DATASETS)
        files = split_words(symbols.text("DATASET_FILES"))
        if files in (("y",), ("n",)):
            raise symbols.error(
                "DATASET_FILES", "takes file globs, not y or n; fix: use a glob such as texts/*.txt"
            )
        if member == "DATASET_LOCAL" and not files:
            raise symbols.error(
                member, "needs CONFIG_DATASET_FILES, which is empty; fix: use a glob such as texts/*.txt"
            )
        if member != "DATASET_LOCAL" and files:
            raise symbols.error(
                "DATASET_FILES",
                f"and CONFIG_{member}=y exclude each other; fix: remove one (CONFIG_DATASET_LOCAL=y uses files)",
            )
        return cls(
            dataset=DATASETS[member],
            files=files,
            max_tokens=symbols.integer("DATASET_MAX_TOKENS"),
            directory=symbols.folder("DATA_DIR"),
            workers=symbols.integer("DATA_WORKERS"),
            tokenizer=vocabulary(symbols).name,
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """tokens: validation tokens per evaluation. interval_tokens: training tokens between them, 0: at the end only.

    sets: held-out texts, evaluated at the end.
    """

    tokens: int
    interval_tokens: int
    hellaswag: bool
    hellaswag_file: Path | None
    hellaswag_limit: int
    sets: tuple[EvalSet, ...] = ()

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> EvaluationConfig:
        tokens, block_size = symbols.integer("EVAL_TOKENS"), symbols.integer("GPT2_BLOCK_SIZE")
        if tokens < block_size:
            raise symbols.error(
                "EVAL_TOKENS",
                f"is less than one sequence of CONFIG_GPT2_BLOCK_SIZE={block_size}; fix: use {block_size} or more",
            )
        hellaswag = symbols.flag("HELLASWAG")
        file = symbols.text("HELLASWAG_FILE") if hellaswag else ""
        return cls(
            tokens=tokens,
            interval_tokens=symbols.integer("EVAL_INTERVAL_TOKENS"),
            hellaswag=hellaswag,
            hellaswag_file=Path(file) if file else None,
            hellaswag_limit=symbols.integer("HELLASWAG_LIMIT") if hellaswag else 0,
            sets=eval_sets(symbols),
        )


@dataclass(frozen=True)
class TargetConfig:
    """The requested hardware. "auto": the machine of the study. detected: the hardware when .config was written.

    cpu_threads: of a run, in a `Config` 1 for small steps; 0: all physical cores.
    ranks: processes of a run, a card each.
    ranks_timeout_seconds: longest wait of a rank for another.
    """

    name: str
    dtype: str
    compile: bool
    cpu_threads: int
    detected: str
    scale_cpu: bool
    deterministic: bool = False
    ranks: int = 1
    ranks_timeout_seconds: int = 600

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> TargetConfig:
        name, dtype = TARGETS[symbols.choice(TARGETS)], DTYPES[symbols.choice(DTYPES)]
        ranks = symbols.integer("RANKS")
        return cls(
            name=name,
            dtype=dtype,
            compile=symbols.flag("COMPILE"),
            cpu_threads=symbols.integer("CPU_THREADS"),
            detected=detected(symbols),
            scale_cpu="SCALE_CPU" in symbols and symbols.flag("SCALE_CPU"),  # .config omits n
            deterministic=symbols.flag("DETERMINISTIC"),
            ranks=ranks,
            ranks_timeout_seconds=symbols.integer("RANKS_TIMEOUT")
            if ranks > 1
            else cls.ranks_timeout_seconds,
        )


# the hardware of this machine, for commands without a .config
ANY_TARGET = TargetConfig("auto", "auto", compile=False, cpu_threads=0, detected="auto", scale_cpu=False)


GRPO_NUMBERS = ("response_tokens", "evaluate_steps", "evaluate_limit", "evaluate_batch")
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

    model: str  # a folder, or a name on the hub
    train_file: str  # "": GSM8K of the hub
    test_file: str
    group: int  # responses per problem
    response_tokens: int  # at most
    evaluate_steps: int  # between two evaluations
    evaluate_limit: int  # test problems; 0: all
    evaluate_batch: int  # test problems at once

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
        return cls(
            model=symbols.text("GRPO_MODEL"),
            train_file=symbols.text("GRPO_TRAIN_FILE"),
            test_file=symbols.text("GRPO_TEST_FILE"),
            group=group,
            **{name: symbols.integer(f"GRPO_{name.upper()}") for name in GRPO_NUMBERS},
        )


@dataclass(frozen=True)
class TrackingConfig:
    """Experiment loggers in processes beside the run. Without wandb its mode is "off" and its project ""."""

    wandb: bool
    wandb_mode: str
    wandb_project: str
    tensorboard: bool = False

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> TrackingConfig:
        wandb, mode, project = symbols.flag("WANDB"), "off", ""
        if wandb:
            mode, project = symbols.text("WANDB_MODE"), symbols.text("WANDB_PROJECT")
            if mode not in ("online", "offline"):
                raise symbols.error("WANDB_MODE", "is not a mode; fix: use online or offline")
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", project):
                raise symbols.error(
                    "WANDB_PROJECT", "is not a project name; fix: use letters, digits, . _ and -"
                )
        return cls(wandb, mode, project, symbols.flag("TENSORBOARD"))


@dataclass(frozen=True)
class AlternationSettings:
    """Settings of RALEARN.

    mix: the mixed quantity ("output", "score", "hard"). initial_probability: share of the reciprocal path, in (0, 1).
    learning_rate_multiplier: of the logits, relative to the rest of the model. recompute: recompute the attention
    calls in backward instead of storing their outputs. gate_every: steps between two gradients of the hard gate.
    """

    mix: str
    initial_probability: float
    learning_rate_multiplier: float
    recompute: bool = False
    gate_every: int = 1

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> AlternationSettings:
        """Read the symbols. ConfigError where a value is out of range."""
        mix = MIXES[symbols.choice(MIXES)]
        return cls(
            mix=mix,
            initial_probability=symbols.number("ALTERNATION_INIT", "(0, 1)"),
            learning_rate_multiplier=symbols.number("ALTERNATION_LR_MULTIPLIER", "(0, 100000]"),
            recompute=symbols.flag("ALTERNATION_RECOMPUTE"),
            gate_every=symbols.integer("ALTERNATION_GATE_EVERY") if mix == "hard" else 1,
        )


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
    checkpoint_seconds: int
    sha256: str
    numerics_fix: str = ""
    monitor: MonitorSettings = NOT_MONITORED
    grpo: GrpoConfig | None = None  # None: the runs train GPT-2

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
        built = cls(
            model=ModelConfig.from_symbols(symbols),
            batch=BatchConfig.from_symbols(symbols),
            budget=BudgetConfig.from_symbols(symbols),
            optimizer=OptimizerConfig.from_symbols(symbols),
            data=DataConfig.from_symbols(symbols),
            evaluation=EvaluationConfig.from_symbols(symbols),
            target=TargetConfig.from_symbols(symbols),
            tracking=TrackingConfig.from_symbols(symbols),
            alternation=AlternationSettings.from_symbols(symbols),
            checkpoint_seconds=symbols.integer("CHECKPOINT_SECONDS"),
            sha256=symbols.sha256,
            numerics_fix=numerics_fix(symbols),
            monitor=MonitorSettings.from_symbols(symbols),
            grpo=GrpoConfig.from_symbols(symbols),
        )
        if built.target.cpu_threads or built.target.ranks > 1 or not built.small_step:
            return built
        return replace(built, target=replace(built.target, cpu_threads=1))


def load_config(path: Path | str) -> Config:
    """Load the .config at `path`. ConfigError names the first fault."""
    return Config.from_symbols(read_symbols(path))


def _custom_size(symbols: Symbols) -> tuple[str, int, int, int]:
    """Return name, layers, heads and width of a custom model. ConfigError where the heads do not divide the width."""
    layers, heads, width = (symbols.integer(name) for name in ("GPT2_LAYERS", "GPT2_HEADS", "GPT2_WIDTH"))
    if not (layers and heads and width) or width % heads:
        raise symbols.error(
            "GPT2_WIDTH", f"is not a multiple of CONFIG_GPT2_HEADS={heads}; fix: use {64 * heads}"
        )
    return "custom", layers, heads, width


def detected(symbols: Symbols) -> str:
    """Read the hardware that was detected when .config was written, a row of the target table."""
    name = symbols.text("DETECTED")
    if not re.fullmatch(r"[a-z0-9-]+", name):
        raise symbols.error(
            "DETECTED", "is not a hardware name; fix: use lower-case letters, digits and -, such as cpu"
        )
    return name
