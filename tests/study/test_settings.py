"""The study settings in .config."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.dotconfig import ConfigError, Symbols, parse_lines, quote
from study.study_settings import StudySettings
from tests.runtime.test_config import DEFAULTS

VALUES = DEFAULTS | {
    "STUDY_NAME": '"night-1"',
    "VARIANTS": '"B RALEARN RA:0,2-3"',
    "SEEDS": "3",
    "GPT2_MAX_TIME": "40",
    "GPT2_MAX_ITERS": "0",
}
SLURM = {"EXECUTOR_LOCAL": "n", "EXECUTOR_SLURM": "y"}


def read(**changes: str) -> StudySettings:
    text = "".join(f"CONFIG_{name}={value}\n" for name, value in (VALUES | changes).items())
    return StudySettings.from_symbols(Symbols("c", parse_lines(text, "c")))


def refusal(**changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_settings_are_read_in_the_order_given():
    expected = StudySettings(
        "night-1", ("B", "RALEARN", "RA:0,2-3"), 3, Path("results"), False, primary="RALEARN"
    )
    assert read() == expected
    assert read(BUDGET_EQUAL_TIME="y").equal_time is True


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", ".hidden", "a b", "x" * 65, "é"])
def test_a_study_name_that_is_not_a_safe_folder_is_refused(name):
    assert "c:1: CONFIG_STUDY_NAME=" in refusal(STUDY_NAME=quote(name))


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_a_safe_study_name_is_below_the_results_folder(name):
    settings = read(STUDY_NAME=quote(name))
    assert (settings.results_dir / settings.name).resolve().parent == settings.results_dir.resolve()


@pytest.mark.parametrize(
    ("variants", "says"),
    [
        ("", "names no variant"),
        ("B RAALL B", "B is named twice"),
        ("B RA:4-6", "layers 0 to 3"),
        ("B,RAALL", "not a variant"),
    ],
)
def test_unknown_and_repeated_variants_are_refused(variants, says):
    message = refusal(VARIANTS=quote(variants))
    assert message.startswith("c:2: CONFIG_VARIANTS=")
    assert says in message


def test_zero_seeds_and_an_empty_results_folder_are_refused():
    assert "fix: CONFIG_SEEDS=1 or more" in refusal(SEEDS="0")
    assert "names no folder" in refusal(RESULTS_DIR='""')


def test_the_equivalence_margin_is_a_percentage_of_perplexity():
    assert read(EQUIVALENCE_MARGIN_PERCENT='"2"').equivalence_margin == pytest.approx(math.log(1.02))
    for wrong in ('"0"', '"100"', '"much"'):
        assert "EQUIVALENCE_MARGIN_PERCENT" in refusal(EQUIVALENCE_MARGIN_PERCENT=wrong)


def test_a_run_without_any_limit_is_refused():
    assert "give no budget" in refusal(GPT2_MAX_TIME="0")
    assert read(GPT2_MAX_TIME="0", GPT2_MAX_ITERS="5").seeds == 3


def test_the_primary_comparison_is_named_or_the_first_variant_that_is_no_control_arm():
    assert read(VARIANTS='"B RAALL"').primary == ""
    assert read(PRIMARY='"RALEARN"').primary == "RALEARN"
    for name in ("RA:0,2-3", "B", "RAALL", "MINE", "RALEARN MINE"):
        assert "CONFIG_PRIMARY=" in refusal(PRIMARY=quote(name))


def test_an_arm_without_control_arms_is_no_primary_comparison():
    rate = "RALEARN+LR=3e-4"
    assert read(VARIANTS=f'"B {rate} GATED"').primary == "GATED"
    assert read(VARIANTS=f'"B {rate}"').primary == ""
    assert read(VARIANTS=f'"B {rate} B+LR=3e-4"').primary == rate
    assert read(VARIANTS=f'"{rate} GATED"').primary == rate  # no verdict in any case
    message = refusal(VARIANTS=f'"B {rate}"', PRIMARY=f'"{rate}"')
    assert "fix: add B+LR=3e-4 to CONFIG_VARIANTS" in message


def test_options_of_sbatch_with_an_open_quote_are_refused():
    assert "CONFIG_SLURM_OPTIONS" in (message := refusal(**SLURM, SLURM_OPTIONS=quote("--comment='a b")))
    assert "minutes" in refusal(**SLURM, SLURM_OPTIONS=quote("--time=2"))
    assert "no closing quotation; fix: " in message
    options = "--comment='a b' --partition=\"gpu\""
    assert read(**SLURM, SLURM_OPTIONS=quote(options)).slurm_options == options
