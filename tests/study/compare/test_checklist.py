"""Settings and versions in the checklist: each has a decision, and none hides another."""

from pathlib import Path
from typing import Any

import pytest

from study.compare import compared_studies as build
from study.compare.loaded_studies import folded
from study.compare.study_checklist import COVERED, HASHED, meaning
from study.kconfig_rules import load_kconfig
from study.study_settings import declared
from tests.study.compared import Settings, a_study, recorded, setting

HASH = "optimizer and budget (hash)"


def symbols_of_kconfig() -> set[str]:
    """Every symbol that a .config of this project can have, choices as the checklist sees them."""
    names = {symbol.name for symbol in load_kconfig("cpu").unique_defined_syms}
    assert {"TARGET_W7900", "ALTERNATION_RECOMPUTE", "WANDB_PROJECT"} <= names
    return set().union(*(folded({name: "y"}) for name in names))


INCOMPARABLE = {
    "LEARNING_RATE", "MIN_LEARNING_RATE_RATIO", "WARMUP_FRACTION", "SCHEDULE", "DECAY_FRACTION", "WEIGHT_DECAY",
    "ADAM_BETA1", "ADAM_BETA2", "ADAM_EPSILON", "GRAD_CLIP", "CONTINUES", "ALTERNATION_MIX", "ALTERNATION_GATE_EVERY",
    "ALTERNATION_INIT", "ALTERNATION_LR_MULTIPLIER", "LEARNING_RATES", "TUNING_SEEDS", "NUMERICS_FIX",
}  # fmt: skip


def test_exactly_these_symbols_of_kconfig_make_studies_incomparable() -> None:
    rated = {name for name in symbols_of_kconfig() if declared(name).entry not in COVERED}
    fatal = {name for name in rated if meaning(name, True)[0] == "fatal"}
    assert {name for name in fatal if not name.startswith("GRPO")} == INCOMPARABLE


@pytest.mark.parametrize("name", ["GPT2_MAX_TIME", "COMPILE", "WANDB_MODE"])
def test_a_harmless_difference_does_not_hide_another_schedule(first: Path, tmp_path: Path, name: str) -> None:
    def both(value: dict[str, Any], config: Settings) -> None:
        setting({name: "7"})(value, config)
        recorded("fingerprint", "schedule", to="other")(value, config)

    comparison = build.build_comparison([first, a_study(tmp_path / "both", both)])
    differing = {check.subject: check.status for check in comparison.checks if check.status != "equal"}
    hashed = {} if declared(name).entry in HASHED else {HASH: "fatal"}
    assert differing == {name: "harmless"} | hashed
    assert bool(comparison.absolute) == (not hashed)
