"""Each symbol of Kconfig is a field of the settings, and its declaration is true of a run."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from gpt2.fingerprint import schedule_digest
from runtime.declared_symbols import symbol_of, walk
from runtime.dotconfig import read_symbols
from runtime.settings import Config
from study.kconfig_rules import load_kconfig
from study.study_settings import StudySettings, declared
from tests import small_runs
from tests.faults.workplace import Workplace
from tests.runtime import test_config
from tests.small_runs import outcome, same

KCONFIG = load_kconfig("cpu")
SYMBOLS = {symbol.name for symbol in KCONFIG.unique_defined_syms}
DECLARED = [*walk(Config), *walk(StudySettings)]
DERIVED = {"vocabulary", "padded_vocabulary", "sha256"}  # fields without a symbol
DOCUMENT = Path(__file__).parents[2] / "docs/configuration.md"


def test_each_symbol_is_one_field_and_a_choice_has_its_members() -> None:
    names = [name for symbol in DECLARED for name in symbol.members or (symbol.name,)]
    assert sorted(names) == sorted(SYMBOLS)
    for choice in KCONFIG.unique_choices:
        members = {symbol.name for symbol in choice.syms}
        assert [set(symbol.members) for symbol in DECLARED if members & symbol.members.keys()] == [members]


def undeclared(kind: Any) -> set[str]:
    """Return the fields of a dataclass and of those in it that have no symbol."""
    names = set()
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if not symbol_of(hint):
            names |= undeclared(hint) if dataclasses.is_dataclass(hint) else {name}
    return names


def test_each_field_has_a_symbol_or_follows_from_others() -> None:
    assert undeclared(Config) | undeclared(StudySettings) == DERIVED


@pytest.mark.parametrize("effect", ["rounding", "verdict", "free"])
def test_the_documentation_has_the_declarations(effect: str) -> None:
    (row,) = re.findall(rf"^\| {effect}\b.*\| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)(?:\.\.\.)?`", row) == [
        symbol.name for symbol in DECLARED if symbol.effect == effect
    ]


OTHER = {
    "EFFECTIVE_BATCH": "32", "GPT2_BLOCK_SIZE": "64", "HELLASWAG_FILE": '"other"', "DATA_DIR": '"other"',
    "EVAL_SETS": '"wikitext-2"', "NUMERICS_FIX": '"cpu:loss"',
}  # fmt: skip
WSD = {"SCHEDULE_COSINE": None, "SCHEDULE_WSD": "y", "DECAY_FRACTION": '"0.2"'}
SINGLE = (
    "DETECTED",
    "SCALE_CPU",
    "DATASET_FILES",
    "MONITOR",
    "WANDB",
    "GRPO",
)  # need another one


def another(name: str, value: str) -> str:
    """Return a value that is allowed and differs."""
    if name in OTHER:
        return OTHER[name]
    if value in ("y", "n"):
        return "n" if value == "y" else "y"
    return f'"{float(value[1:-1]) / 2 or 0.25}"' if value.startswith('"') else str(int(value) * 2 or 1)


def entries(changes: dict[str, Any]) -> dict[str, Any]:
    """Return what the settings give for each entry of a record."""
    config = Config.from_symbols(test_config.symbols(**changes))
    return {
        "model": config.model,
        "data": replace(config.data, directory=Path(), workers=0),
        "validation": config.evaluation.tokens,
        "batch": config.batch,
        "schedule": schedule_digest(config),
        "": (config.numerics_fix, replace(config.alternation, recompute=False)),
    }


def test_exactly_the_settings_of_effect_numbers_change_an_entry_of_the_record() -> None:
    values = {**test_config.VALUES, **WSD}
    names = {symbol.name for symbol in walk(Config) if not symbol.name.startswith(SINGLE)}
    tried = {name: another(name, values[name]) for name in names & values.keys()}
    for name, value in tried.items():
        before, after = entries(WSD), entries(WSD | {name: value})
        entry = declared(name).entry
        expected = ["schedule" if entry == "budget" else entry] if declared(name).effect == "numbers" else []
        assert [entry for entry in before if before[entry] != after[entry]] == expected, name
    assert len(tried) > 20
    assert entries(WSD)["schedule"] != entries({})["schedule"]


# Other values of all free symbols. The rest need a cluster or ranks.
FREE = {
    "DATA_DIR": "prepared", "RESULTS_DIR": "elsewhere", "CHECKPOINT_SECONDS": "7", "DATA_WORKERS": "1",
    "GPT2_HARD_LIMIT": "86400", "EXECUTOR_RAY": "y", "RAY_ADDRESS": "other", "WANDB": "y", "WANDB_MODE": "online",
    "WANDB_PROJECT": "other", "TENSORBOARD": "y", "MONITOR": "y", "MONITOR_TARGETS": "all", "MONITOR_INTERVAL": "2",
    "MONITOR_TRIGGERS": "spike:3", "MONITOR_FULL_STEPS": "3",
}  # fmt: skip
HIDDEN = {"EXECUTOR_LOCAL", "EXECUTOR_SLURM", "SLURM_OPTIONS", "RANKS_TIMEOUT"}


@pytest.mark.usefixtures("one_thread")
def test_all_free_symbols_at_once_change_not_a_bit(tmp_path: Path) -> None:
    assert {name for name in SYMBOLS if declared(name).effect == "free"} == FREE.keys() | HIDDEN
    place = Workplace(tmp_path, small_runs.write_texts(tmp_path / "texts"), GPT2_MAX_ITERS="12")
    found = []
    for changes in ({}, FREE):
        place.configure(GPT2_MAX_ITERS="12", **changes)
        config = Config.from_symbols(read_symbols(tmp_path / ".config"))
        config = replace(config, data=replace(config.data, directory=tmp_path / config.data.directory))
        folder = tmp_path / f"run{len(found)}"
        assert small_runs.start(folder, config, "RALEARN").train() == "finished"
        found.append((outcome(folder), config))
    assert same(found[0][0], found[1][0])
    assert (found[0][1].monitor, found[0][1].data.directory) != (
        found[1][1].monitor,
        found[1][1].data.directory,
    )
