"""Settings and versions in the checklist: each has a decision, and none hides another."""

from pathlib import Path
from typing import Any

import pytest

from gpt2.fingerprint import schedule_digest
from runtime.settings import Config
from study.compare import compared_studies as build
from study.compare.loaded_studies import CHOICES, folded
from study.compare.study_checklist import COVERED, HASHED, LIMITS, meaning
from study.kconfig_rules import load_kconfig
from tests.runtime import test_config
from tests.study.compared import Settings, a_study, recorded, setting

HASH = "optimizer and budget (hash)"


def symbols_of_kconfig() -> set[str]:
    """Every symbol that a .config of this project can have, choices as the checklist sees them."""
    names = {symbol.name for symbol in load_kconfig("cpu").unique_defined_syms}
    assert {"TARGET_W7900", "ALTERNATION_RECOMPUTE", "WANDB_PROJECT"} <= names
    return set().union(*(folded({name: "y"}) for name in names))


CHANGES_TRAINING = {
    *HASHED, "ALTERNATION_MIX", "ALTERNATION_GATE_EVERY", "ALTERNATION_INIT", "ALTERNATION_LR_MULTIPLIER",
    "LEARNING_RATES", "TUNING_SEEDS", "NUMERICS_FIX",
}  # fmt: skip


def test_exactly_these_symbols_of_kconfig_make_studies_incomparable() -> None:
    rated = {name for name in symbols_of_kconfig() if not name.startswith(COVERED)}
    fatal = {name for name in rated if meaning(name, True)[0] == "fatal"}
    assert fatal == CHANGES_TRAINING - set(LIMITS)  # the row schedule compares what the limits give


def test_every_choice_that_is_one_symbol_here_is_a_choice_of_kconfig() -> None:
    members = {symbol.name for choice in load_kconfig("cpu").unique_choices for symbol in choice.syms}
    for prefix in CHOICES:
        named = {name for name in members if name.startswith(prefix)}
        assert len(named) > 1
        assert (
            len({choice for name in named for choice in [load_kconfig("cpu").syms[name].choice.name_and_loc]})
            == 1
        )


WSD = {"SCHEDULE_COSINE": "n", "SCHEDULE_WSD": "y", "DECAY_FRACTION": '"0.2"'}
OTHER = {
    "EFFECTIVE_BATCH": "32", "GPT2_BLOCK_SIZE": "64", "HELLASWAG_FILE": '"other"', "DATA_DIR": '"other"',
    "EVAL_SETS": '"wikitext-2"', "NUMERICS_FIX": '"cpu:loss"',
}  # fmt: skip


def another(name: str, value: str) -> str:
    """A value that is allowed and differs."""
    if name in OTHER:
        return OTHER[name]
    if value in ("y", "n"):
        return "n" if value == "y" else "y"
    return f'"{float(value[1:-1]) / 2 or 0.25}"' if value.startswith('"') else str(int(value) * 2 or 1)


def test_a_different_schedule_hash_is_explained_by_the_settings_in_it() -> None:
    values = {**test_config.VALUES, **WSD}

    def digest(changes: dict[str, Any]) -> str:
        return schedule_digest(Config.from_symbols(test_config.symbols(**changes)))

    single = ("DETECTED", "DATASET_EMBEDDED", "DATASET_FILES", "SCHEDULE_COSINE", "SCHEDULE_WSD", *CHOICES)
    tried = {name: value for name, value in values.items() if not name.startswith(single)}
    tried = {name: another(name, value) for name, value in tried.items() if name not in ("WANDB", "MONITOR")}
    entering = {name for name, value in tried.items() if digest(WSD | {name: value}) != digest(WSD)}
    if digest(WSD) != digest({}):
        entering.add("SCHEDULE_WSD")
    assert len(tried) > 20
    assert entering | {"CONTINUES"} == set(HASHED)  # a study's plan has that digest


@pytest.mark.parametrize("name", ["GPT2_MAX_TIME", "COMPILE", "WANDB_MODE"])
def test_a_harmless_difference_does_not_hide_another_schedule(first: Path, tmp_path: Path, name: str) -> None:
    def both(value: dict[str, Any], config: Settings) -> None:
        setting({name: "7"})(value, config)
        recorded("fingerprint", "schedule", to="other")(value, config)

    comparison = build.build_comparison([first, a_study(tmp_path / "both", both)])
    differing = {check.subject: check.status for check in comparison.checks if check.status != "equal"}
    hashed = {} if name in HASHED else {HASH: "fatal"}
    assert differing == {name: "harmless"} | hashed
    assert bool(comparison.absolute) == (name in HASHED)


def test_another_schedule_is_fatal_also_for_studies_without_that_setting(first: Path, tmp_path: Path) -> None:
    cosine = build.build_comparison([first, a_study(tmp_path / "cosine", setting({"SCHEDULE_COSINE": "y"}))])
    assert cosine.absolute
    comparison = build.build_comparison([first, a_study(tmp_path / "wsd", setting(WSD))])
    assert {check.subject for check in comparison.checks if check.status == "fatal"} == {
        "SCHEDULE_WSD",
        "DECAY_FRACTION",
    }
