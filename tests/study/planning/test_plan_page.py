"""`make plan`: its numbers, their sources, and a text that fits a terminal. Nothing is written."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from referee.pages.document import render_terminal
from referee.verdict.looks import nominal_levels
from referee.verdict.power import mde
from runtime.dotconfig import Symbols, read_symbols
from runtime.settings import CORE_WORK, load_config
from study import plan_file
from study.analysis.designs import Noise, detectable_difference
from study.planning.plan_page import forecast, forecasts, plan_document, times
from study.planning.planned_power import find_past_studies, study_sight
from study.preconditions import needed_bytes
from study.study_settings import StudySettings
from study.tuned_rates import most_judged
from tests.kconfig_commands import defconfig
from tests.study.planning.test_past import finished_study
from tests.study.sample_records import a_design, edit

SMALL = (
    "CONFIG_GPT2_MODEL_TINY=y",
    "CONFIG_TARGET_CPU=y",
    "CONFIG_GPT2_BLOCK_SIZE=32",
    "CONFIG_EVAL_TOKENS=64",
    "CONFIG_SLOTS=1",
)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")


def configured(*assignments: str) -> Symbols:
    defconfig(*SMALL, *assignments)
    return read_symbols(".config")


def settings_of(symbols: Symbols) -> dict[str, str]:
    return {name: entry.value for name, entry in symbols.entries.items()}


def shown(symbols: Symbols, given: float | None = None) -> str:
    settings = StudySettings.from_symbols(symbols)
    past = find_past_studies(settings.results_dir, settings_of(symbols))
    studies = forecasts(symbols, Path(".config").read_text(), past)
    sight = study_sight(settings, past, given, studies[-1].looks)
    text = render_terminal(plan_document(studies, settings, sight))
    assert max(map(len, text.splitlines())) <= 100
    return text


def a_past_study(symbols: Symbols, name: str = "past", **changed: str) -> Path:
    return finished_study(Path("results") / name, **settings_of(symbols) | changed)


def test_without_a_finished_study_the_budget_is_the_time_and_the_noise_is_unknown() -> None:
    symbols = configured("CONFIG_GPT2_MAX_TIME=360")
    found = forecast(symbols, [])
    assert found.hours.of(found.pending) == pytest.approx(25 * 0.1)
    assert found.hours.of(found.one_seed) == pytest.approx(0.5)
    assert found.disk_bytes == needed_bytes(found.config.model.parameters, [0] * 25)
    text = shown(symbols)
    for part in (
        "CONFIG_GPT2_MAX_TIME=360", "no finished study", "The noise is unknown", "1.91 times the noise of",
        "2.5 hours", "30 minutes", "This command trains nothing",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part
    assert not Path("results").exists()


def test_a_given_noise_is_the_only_one() -> None:
    symbols = configured()
    a_past_study(symbols)
    settings = StudySettings.from_symbols(symbols)
    past = find_past_studies(settings.results_dir, settings_of(symbols))
    sight = study_sight(settings, past, 0.5, (5,))
    (row,) = sight.rows
    expected = detectable_difference(Noise.of_both(math.log(1.005)), 4, 5)
    assert row.sees == row.low == row.high == pytest.approx(expected)


def test_a_finished_study_gives_noise_and_overhead_and_its_other_settings_are_named() -> None:
    symbols = configured()
    for run in a_past_study(symbols, LEARNING_RATE="9e-3").glob("runs/*"):
        device = forecast(symbols, []).memory.target.partition("(")[2][:-1]
        edit(run.parents[1], run.name, target={"device": device})
    text = " ".join(shown(symbols).split())
    assert "Noise of control arms: results/past (another CONFIG_LEARNING_RATE)." in text
    assert "Noise of RALEARN: its differences in results/past" in text
    assert "140 s of other time a run, as in results/past" in text


def test_a_plan_gives_its_step_times_and_finished_runs_are_not_pending() -> None:
    symbols = configured("CONFIG_SEEDS=3")
    settings = StudySettings.from_symbols(symbols)
    directory = settings.results_dir / settings.name
    finished_study(directory, seeds=1)
    batch = {"effective": 4, "micro": 2, "accumulation": 2, "world_size": 1, "block_size": 32}
    rows = {name: {"class": "x", "iterations": 100, "tokens": 12800} for name in settings.variants}
    budget: dict[str, Any] = {"max_time_seconds": 30, "max_tokens": 0, "max_iterations": 0}
    plan = {"schema": 1, "batch": batch, "budget": budget, "variants": rows,
            "classes": {"x": {"seconds_per_iteration": 0.36}}}  # fmt: skip
    plan_file.write(directory, plan_file.from_json(plan))
    found = forecast(symbols, [])
    assert (len(found.runs), len(found.pending)) == (15, 10)
    assert found.hours.of(found.pending) == pytest.approx(0.1)
    assert (found.memory.micro, found.memory.accumulation) == (2, 2)
    assert "step times measured" in found.hours.train_source
    assert found.looks == (3,)


def test_more_seeds_than_planned_are_another_look_at_a_stricter_level() -> None:
    symbols = configured("CONFIG_SEEDS=6")
    settings = StudySettings.from_symbols(symbols)
    batch = {"effective": 4, "micro": 4, "accumulation": 1, "world_size": 1, "block_size": 32}
    rows = {name: {"class": "x", "iterations": 100, "tokens": 12800} for name in settings.variants}
    budget: dict[str, Any] = {"max_time_seconds": 30, "max_tokens": 0, "max_iterations": 0}
    plan = {"schema": 1, "batch": batch, "budget": budget, "variants": rows, **a_design()}
    assert forecast(symbols, []).looks == (6,)
    directory = settings.results_dir / settings.name
    directory.mkdir(parents=True)
    plan_file.write(directory, plan_file.from_json(plan))
    assert forecast(symbols, []).looks == (6,)  # before its first run the plan follows CONFIG_SEEDS
    finished_study(directory, seeds=1)
    found = forecast(symbols, [])
    assert found.looks == (3, 6)
    text = " ".join(shown(symbols, 0.5).split())
    assert "6 seeds, two-sided paired t test, 80 % power. Look 2, at level 0.34 %." in text
    (row,) = study_sight(settings, [], 0.5, found.looks).rows
    assert row.sees == pytest.approx(mde(row.noise.spread(4), 6, nominal_levels((3, 6))[-1]))


def test_a_count_on_a_cpu_has_the_time_of_a_finished_study_or_of_its_work_and_on_a_card_none() -> None:
    symbols = configured("CONFIG_GPT2_MAX_ITERS=100")
    model = load_config(".config").model
    expected = model.parameters * 100 * 4 * 32 / CORE_WORK / 3600
    assert forecast(symbols, []).hours.of([("B", 0)]) == pytest.approx(expected)
    device = forecast(symbols, []).memory.target.partition("(")[2][:-1]
    study = a_past_study(symbols)
    for run in study.glob("runs/*"):
        edit(study, run.name, target={"device": device})
    past = find_past_studies(Path("results"), settings_of(symbols))
    found = forecast(symbols, past)
    seconds = 100 * 4 * 32 * past[0].seconds_per_token() + 140
    assert found.hours.of([("B", 0)]) == pytest.approx(seconds / 3600)
    counted = ("CONFIG_GPT2_MAX_TIME=0", "CONFIG_GPT2_MAX_ITERS=100")
    defconfig("CONFIG_GPT2_MODEL_TINY=y", *counted, spec="gpt2-ra-ablation+a100-40g")
    assert "unknown" in shown(read_symbols(".config"))


def test_runs_at_once_share_the_time_and_a_plan_of_more_than_a_night_names_a_shorter_one() -> None:
    symbols = configured("CONFIG_GPT2_MAX_TIME=7200")
    found = forecast(symbols, [])
    assert replace(found, at_once=4).time(found.pending) == pytest.approx(25 * 2 / 4)
    lines = [len(times([replace(found, at_once=count)])) for count in (1, 4, 5)]  # 50, 12.5 and 10 hours
    assert lines == [2, 2, 1]
    defconfig(spec="gpt2-ra-ablation-night+a100-40g")
    hours = forecast(read_symbols(".config"), []).time([(name, 0) for name in ("B", "RAALL", "RALEARN")])
    assert hours is not None
    assert 8 <= 3 * hours <= 11


def test_tuned_rates_are_a_study_before_the_judged_one() -> None:
    rates = ("CONFIG_LEARNING_RATES=1e-3 2e-3 4e-3", "CONFIG_GPT2_MAX_TIME=30")
    symbols = configured("CONFIG_VARIANTS=B RAALL RALEARN GATED", *rates)
    tuning, judged = forecasts(symbols, Path(".config").read_text(), [])
    settings = StudySettings.from_symbols(symbols)
    assert len(tuning.runs) == 4 * 3 * 2
    assert {seed for _, seed in tuning.runs} == {1000, 1001}
    assert judged.settings.variants == tuple(most_judged(settings.variants, settings.rates))
    assert tuning.hours.of(tuning.pending) == pytest.approx(24 * 30 / 3600)
    assert "gpt2-ra-ablation" in (text := " ".join(shown(symbols, 0.5).split()))
    assert "rates chooses the learning rates" in text


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("CONFIG_VARIANTS=B RAALL", "there is no verdict"),
        ("CONFIG_VARIANTS=RALEARN", "fix: add B to CONFIG_VARIANTS"),
        ("CONFIG_SEEDS=2", "fix: CONFIG_SEEDS=3 or more"),
    ],
)
def test_a_study_without_a_verdict_is_named(assignment: str, part: str) -> None:
    assert part in shown(configured(assignment))


def test_every_judged_arm_costs_runs() -> None:
    page = shown(configured("CONFIG_VARIANTS=B RALEARN GATED"), 0.5)
    (seeds, runs) = re.findall(r"\(1 \+ 2\) x (\d+) = (\d+)", page)[0]
    assert int(runs) == 3 * int(seeds)
