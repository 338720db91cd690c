"""Each symbol of Kconfig is declared once, and the declarations are true of the settings and of a run."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2.fingerprint import schedule_digest
from runtime.dotconfig import read_symbols
from runtime.settings import Config
from runtime.symbol_effects import SYMBOLS as TABLE
from runtime.symbol_effects import WORDS, declared
from study.compare.loaded_studies import CHOICES
from study.kconfig_rules import load_kconfig
from tests import small_runs
from tests.faults.workplace import Workplace
from tests.runtime import test_config
from tests.small_runs import outcome, same

KCONFIG = load_kconfig("cpu")
SYMBOLS = {symbol.name for symbol in KCONFIG.unique_defined_syms}
DOCUMENT = Path(__file__).parents[2] / "docs/configuration.md"


def test_each_symbol_is_declared_once_and_a_start_has_one_choice() -> None:
    words = " ".join(TABLE.values()).split()
    found = {
        word: [name for name in SYMBOLS if word == name or (word in CHOICES and name.startswith(word))]
        for word in words
    }
    assert sorted(name for names in found.values() for name in names) == sorted(SYMBOLS)
    assert all(found.values())
    for word in CHOICES:
        assert len({KCONFIG.syms[name].choice for name in found[word]} - {None}) == 1


@pytest.mark.parametrize("effect", ["rounding", "verdict", "free"])
def test_the_documentation_has_the_declarations(effect: str) -> None:
    (row,) = re.findall(rf"^\| {effect}\b.*\| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)(?:\.\.\.)?`", row) == [name for name in WORDS if WORDS[name].effect == effect]


OTHER = {
    "EFFECTIVE_BATCH": "32", "GPT2_BLOCK_SIZE": "64", "HELLASWAG_FILE": '"other"', "DATA_DIR": '"other"',
    "EVAL_SETS": '"wikitext-2"', "NUMERICS_FIX": '"cpu:loss"',
}  # fmt: skip
WSD = {"SCHEDULE_COSINE": None, "SCHEDULE_WSD": "y", "DECAY_FRACTION": '"0.2"'}
SINGLE = (
    "DETECTED",
    "SCALE_CPU",
    "SCHEDULE_",
    "DATASET_EMB",
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
    single = (*SINGLE, *(word for word in CHOICES if word != "DATASET_"))
    tried = {
        name: another(name, value) for name, value in values.items() if value and not name.startswith(single)
    }
    for name, value in tried.items():
        before, after = entries(WSD), entries(WSD | {name: value})
        effect, entry = declared(name)
        expected = ["schedule" if entry == "budget" else entry] if effect == "numbers" else []
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
