"""Test the strict reader of .config and its dataclasses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.declared_symbols import walk
from runtime.dotconfig import ConfigError, Symbols, parse_lines
from runtime.settings import Config, DataConfig
from study.kconfig_rules import load_kconfig

DEFAULTS = {
    entry.name: str(entry).partition("=")[2]
    for symbol in load_kconfig("cpu").unique_defined_syms
    for entry in parse_lines(symbol.config_string, "c").values()
}
VALUES = DEFAULTS | {
    "GPT2_MAX_TIME": "40",
    "GPT2_MAX_ITERS": "0",
    "EFFECTIVE_BATCH": "16",
    "TOKENIZER_BYTES": "n",
    "TOKENIZER_GPT2": "y",
    "HELLASWAG": "y",
    "HELLASWAG_FILE": '"items.jsonl"',
    "HELLASWAG_LIMIT": "200",
    "RANKS_TIMEOUT": "600",
}


def symbols(**changes: str | None) -> Symbols:
    """Parse VALUES with changes; None removes a symbol."""
    values = {name: value for name, value in (VALUES | changes).items() if value is not None}
    return Symbols(
        "c", parse_lines("".join(f"CONFIG_{name}={value}\n" for name, value in values.items()), "c")
    )


def refusal(**changes: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_symbols(symbols(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_fills_every_field():
    config = Config.from_symbols(symbols())
    assert (config.model.size, config.model.layers, config.model.heads, config.model.width) == (
        "mini",
        4,
        4,
        128,
    )
    assert (config.model.vocabulary, config.model.padded_vocabulary) == (50257, 50304)
    assert (config.batch.effective, config.batch.micro) == (16, 0)
    assert config.budget.max_time_seconds == 40
    assert dataclasses.astuple(config.optimizer)[:8] == (1.2e-3, 0.0, 0.1, 0.1, 0.9, 0.99, 1e-8, 1.0)
    assert config.data == DataConfig("embedded", (), 0, Path("data"), 0)
    assert config.evaluation.hellaswag_file == Path("items.jsonl")
    assert dataclasses.astuple(config.target) == (
        "auto",
        "auto",
        False,
        0,
        "cpu",
        True,
        False,
        1,
        600,
        False,
    )
    assert dataclasses.astuple(config.tracking) == (False, "off", "", False)
    assert config.checkpoint_seconds == 30


def test_small_steps_have_one_thread_unless_threads_or_ranks_are_set():
    """The number is that of the settings on every machine: losses depend on it."""

    def threads(**changes):
        return Config.from_symbols(symbols(**changes)).target.cpu_threads

    small = {"EFFECTIVE_BATCH": "4"}
    assert threads(**small) == 1
    assert threads(**small, CPU_THREADS="2") == 2
    assert threads(**small, RANKS="2") == 0
    assert threads(EFFECTIVE_BATCH="512", MICRO_BATCH="4") == 1
    assert threads(EFFECTIVE_BATCH="512") == 0  # micro-batches of 4096 tokens
    assert threads(EFFECTIVE_BATCH="4", GPT2_MODEL_MINI="n", GPT2_MODEL_124M="y") == 0


def test_a_missing_symbol_is_named():
    of_runs = {symbol.name for symbol in walk(Config)} & VALUES.keys()
    for missing in of_runs - {"SCALE_CPU", "RANKS_TIMEOUT"}:
        message = refusal(**{missing: None})
        assert missing in message
        assert "make olddefconfig" in message


def test_the_tokenizer_sets_the_vocabulary():
    config = Config.from_symbols(symbols(TOKENIZER_GPT2="n", TOKENIZER_BYTES="y"))
    assert (config.model.vocabulary, config.model.padded_vocabulary) == (257, 384)
    assert config.data.tokenizer == "bytes"


WSD = {"SCHEDULE_COSINE": "n", "SCHEDULE_WSD": "y", "DECAY_FRACTION": '"0.2"'}


def test_only_wsd_has_a_decay():
    assert Config.from_symbols(symbols()).optimizer.schedule == "cosine"
    optimizer = Config.from_symbols(symbols(**WSD)).optimizer
    assert (optimizer.schedule, optimizer.decay_fraction) == ("wsd", 0.2)
    assert "make olddefconfig" in refusal(**WSD | {"DECAY_FRACTION": None})


@pytest.mark.parametrize(
    ("decay", "word"), [("0", "(0, 1]"), ("1.1", "(0, 1]"), ("0.96", "at most 1 together")]
)
def test_warm_up_and_decay_together_fit_the_budget(decay, word):
    message = refusal(**WSD | {"DECAY_FRACTION": f'"{decay}"'})
    assert "CONFIG_DECAY_FRACTION" in message
    assert word in message


FLOATS = {
    "GPT2_DROPOUT": "[0, 1)",
    "LEARNING_RATE": "(0, 1]",
    "MIN_LEARNING_RATE_RATIO": "[0, 1]",
    "WARMUP_FRACTION": "[0, 1)",
    "WEIGHT_DECAY": "[0, 10]",
    "ADAM_BETA1": "[0, 1)",
    "ADAM_BETA2": "[0, 1)",
    "ADAM_EPSILON": "(0, 1]",
}


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_a_float_out_of_bounds_is_refused_with_the_bounds(name):
    interval = FLOATS[name]
    low, high = interval[1:-1].split(", ")
    outside = ["-0.001", f"{float(high) + 0.001}"]
    for bound, sign in ((low, interval[0]), (high, interval[-1])):
        if sign in "()":
            outside.append(bound)
        else:
            Config.from_symbols(symbols(**{name: f'"{bound}"'}))
    for value in outside:
        message = refusal(**{name: f'"{value}"'})
        assert f'CONFIG_{name}="{value}" is not a number in {interval}; fix: ' in message


@pytest.mark.parametrize("text", ["nan", "1e999", "1_0", "1,5", "", "١"])
def test_floats_that_are_not_plain_decimals_are_refused(text):
    message = refusal(GRAD_CLIP=f'"{text}"')
    assert message.startswith("c:")
    assert f'CONFIG_GRAD_CLIP="{text}"' in message


@pytest.mark.parametrize("value", ["-1", "1.5", '"1"', "01"])
def test_integers_in_another_form_are_refused(value):
    message = refusal(CPU_THREADS=value)
    assert message.startswith("c:")
    assert f": CONFIG_CPU_THREADS={value} is not a whole number" in message


def test_a_flag_is_y_or_n_unquoted():
    for value in ("1", "yes", '"y"'):
        assert "neither y nor n" in refusal(COMPILE=value)


def test_a_choice_has_exactly_one_member():
    assert "is y; fix: make olddefconfig" in refusal(TARGET_AUTO="n")
    message = refusal(TARGET_CPU="y")
    assert "CONFIG_TARGET_CPU=y and CONFIG_TARGET_AUTO=y exclude each other" in message
    assert Config.from_symbols(symbols(TARGET_AUTO="n", TARGET_A100_40G="y")).target.name == "a100-40g"


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_micro_batch_that_does_not_divide_the_effective_batch_is_refused_with_the_nearest_divisors(
    effective, micro
):
    changes = {"EFFECTIVE_BATCH": str(effective), "MICRO_BATCH": str(micro)}
    if micro == 0 or effective % micro == 0:
        batch = Config.from_symbols(symbols(**changes)).batch
        assert (batch.effective, batch.micro) == (effective, micro)
        return
    message = refusal(**changes)
    near = [int(value) for value in message.split("fix: use ")[1].split(", or 0")[0].split(", ")]
    assert all(effective % value == 0 for value in near)
    best = min(abs(value - micro) for value in range(1, effective + 1) if effective % value == 0)
    assert min(abs(value - micro) for value in near) == best


@given(st.integers(1, 512), st.integers(1, 64), st.integers(2, 64))
def test_a_micro_batch_above_the_share_of_a_rank_is_refused_with_the_ranks_that_work(share, micro, ranks):
    """The micro-batch of an existing study does not change, its ranks may."""
    effective = share * ranks
    changes = {"EFFECTIVE_BATCH": str(effective), "MICRO_BATCH": str(micro)}
    if share % micro == 0:
        assert Config.from_symbols(symbols(RANKS=str(ranks), **changes)).batch.micro == micro
        return
    message = refusal(RANKS=str(ranks), **changes)
    assert f"does not divide the {share} sequences of a rank" in message
    if effective % micro:
        assert "CONFIG_RANKS=" not in message
        return
    named = message.split("in an existing study use CONFIG_RANKS=")[1].split(", ")
    for value in named:
        assert Config.from_symbols(symbols(RANKS=value, **changes)).batch.micro == micro


def test_a_run_without_any_limit_is_refused():
    assert "give no budget" in refusal(GPT2_MAX_TIME="0")
    for name in ("GPT2_MAX_TOKENS", "GPT2_MAX_ITERS"):
        Config.from_symbols(symbols(**{"GPT2_MAX_TIME": "0", name: "7"}))


def test_files_and_the_data_set_agree():
    local = {"DATASET_EMBEDDED": "n", "DATASET_LOCAL": "y"}
    data = Config.from_symbols(symbols(**local, DATASET_FILES='"a/*.txt  b.md"')).data
    assert (data.dataset, data.files) == ("files", ("a/*.txt", "b.md"))
    assert "which is empty" in refusal(**local)
    assert "exclude each other" in refusal(DATASET_FILES='"a.txt"')
    assert "takes file globs" in refusal(**local, DATASET_FILES='"y"')


def test_tracking_is_online_or_offline():
    on = {"WANDB": "y", "WANDB_MODE": '"offline"', "WANDB_PROJECT": '"p"'}
    assert dataclasses.astuple(Config.from_symbols(symbols(**on)).tracking) == (
        True,
        "offline",
        "p",
        False,
    )
    assert Config.from_symbols(symbols(**on, TENSORBOARD="y")).tracking.tensorboard
    assert "fix: use online or offline" in refusal(**on | {"WANDB_MODE": '"maybe"'})
    assert "WANDB_PROJECT" in refusal(**on | {"WANDB_PROJECT": '"a b"'})


def test_an_error_names_the_line_that_set_the_value():
    source = symbols(LEARNING_RATE='"2"')
    source.origins["LEARNING_RATE"] = "command line"
    with pytest.raises(
        ConfigError, match=r'^command line: CONFIG_LEARNING_RATE="2" is not a number in \(0, 1\]'
    ):
        Config.from_symbols(source)
