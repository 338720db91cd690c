"""CONFIG_MONITOR: no bit of a run changes, a resume writes no step twice, and the first wrong step is caught."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.trainer import TrainingRun
from gpt2.training_step import NotFiniteError, Stepper
from gpt2.watch import keep_checkpoint
from referee.numerics.monitor.monitor_tables import read_series, table_files
from referee.numerics.monitor.targets import KINDS, read_triggers
from runtime import checkpoint, run_record
from runtime.settings import Config, MonitorSettings
from tests import small_runs
from tests.referee.numerics.monitor.table_rows import read_rows
from tests.small_runs import StopAfter, outcome, same, start

TRIGGERS = ("nan", "spike", "grad_norm")
EVERYTHING = MonitorSettings(True, 1, ("all",), TRIGGERS)
DEFAULT = MonitorSettings(True, 10, ("grad", "param"), TRIGGERS, full_steps=2)


def configuration(texts: Path, settings: MonitorSettings, iterations: int = 8, **options: Any) -> Config:
    return dataclasses.replace(small_runs.configuration(texts, iterations, **options), monitor=settings)


def rows(directory: Path, kind: str, rank: int = 0) -> list[Any]:
    return list(read_rows(directory / "monitor" / f"rank{rank}", kind))


def steps(directory: Path, kind: str) -> list[int]:
    return sorted({row.step for row in rows(directory, kind)})


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (directory / "monitor/rank0").iterdir()}


def test_no_bit_changes_and_a_resume_writes_no_step_twice(tmp_path: Path, texts: Path) -> None:
    name, check = "RALEARN", 7
    plain = small_runs.configuration(texts, 8, dropout=0.2)
    watched = dataclasses.replace(plain, monitor=EVERYTHING)
    start(tmp_path / "plain", plain, name).train()
    start(tmp_path / "watched", watched, name).train()
    expected = outcome(tmp_path / "plain")
    assert same(outcome(tmp_path / "watched"), expected)
    assert set(table_files(tmp_path / "watched/monitor/rank0")) == set(KINDS) - {
        "grad_unreduced",
        "grad_before",
        "data",
    }
    assert steps(tmp_path / "watched", "actv_grad") == list(range(1, 9))
    directory = tmp_path / "stopped"
    start(directory, watched, name, StopAfter(check)).train()
    start(directory, watched, name).train()
    assert same(outcome(directory), expected)
    assert content(directory) == content(tmp_path / "watched")


def test_a_killed_run_repeats_the_steps_after_its_checkpoint_once(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts, EVERYTHING)
    start(tmp_path / "whole", config).train()
    run = start(tmp_path / "killed", config)
    step = run.one_step

    def killed(feed: Any) -> None:
        step(feed)
        if run.iteration == 3:
            run.save()
        if run.iteration == 6:
            raise MemoryError("killed")

    run.one_step = killed  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run.train()
    with (tmp_path / "killed/monitor/rank0/param_0-999.csv").open("a") as file:
        file.write("0,token.weig")  # torn
    assert steps(tmp_path / "killed", "param") == list(range(1, 7))
    start(tmp_path / "killed", config).train()
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_clean_run_triggers_nothing_and_has_the_default_tables(tmp_path: Path, texts: Path) -> None:
    start(tmp_path, configuration(texts, DEFAULT, 50)).train()
    assert read_triggers(tmp_path / "monitor") == []
    assert set(table_files(tmp_path / "monitor/rank0")) == {"grad_reduced", "learning_rate", "param"}
    assert steps(tmp_path, "param") == list(range(1, 51, 10))
    assert not (tmp_path / "anomaly").exists()
    model = start(tmp_path / "model", configuration(texts, DEFAULT)).stepper.model
    assert len({row.name for row in rows(tmp_path, "param")}) == len(list(model.parameters()))


Fault = Callable[[Stepper], Any]


def scaled_gradient(stepper: Stepper) -> Any:
    """The gradient of one weight is 100,000 times too large in a step."""
    return stepper.model.blocks[1].mlp.fc.weight.register_hook(lambda gradient: gradient * 1e5)


def wrong_output(stepper: Stepper) -> Any:
    """A layer's output has the wrong sign and size in a step."""
    return stepper.model.norm.register_forward_hook(lambda module, inputs, output: output * -30)


def not_a_number(stepper: Stepper) -> Any:
    return stepper.model.blocks[0].mlp.fc.register_forward_hook(
        lambda module, inputs, output: output * float("nan")
    )


def inject(run: TrainingRun, fault: Fault, iteration: int) -> None:
    """Inject a fault into one step of this process."""
    plain = run.stepper.step

    def step(ids_ET: Any, number: int, *rest: Any) -> Any:
        handle = fault(run.stepper) if number + 1 == iteration else None
        try:
            return plain(ids_ET, number, *rest)
        finally:
            if handle:
                handle.remove()

    run.stepper.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(("fault", "trigger"), [(scaled_gradient, "grad_norm"), (wrong_output, "spike")])
def test_the_first_wrong_step_is_caught_with_the_checkpoint_before_it(
    tmp_path: Path, texts: Path, fault: Fault, trigger: str
) -> None:
    run = start(tmp_path, configuration(texts, DEFAULT, 30))
    inject(run, fault, 25)
    run.checkpoint_due = lambda: run.iteration in (20, 24, 26, 27, 28)  # type: ignore[method-assign]
    assert run.train() == "finished"
    found = read_triggers(tmp_path / "monitor")
    assert (found[0]["step"], found[0]["checkpoint"]) == (25, "anomaly/00000024")
    assert trigger in {entry["trigger"] for entry in found if entry["step"] == 25}
    assert checkpoint.load(tmp_path / "anomaly/00000024").iteration == 24  # the run's own are newer
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoint")] == ["00000030"]
    assert steps(tmp_path, "grad_reduced")[:4] == [1, 11, 21, 25]
    assert {25, 26, 27} <= set(steps(tmp_path, "exp_avg"))
    assert {26, 27} <= set(steps(tmp_path, "actv"))
    assert 24 not in steps(tmp_path, "param")
    caught = read_rows(tmp_path / "monitor/caught/step25/rank0", "grad_reduced")
    assert {row.step for row in caught} == {25}
    if fault is scaled_gradient:
        assert max(caught, key=lambda row: row.values[0]).name == "blocks.1.mlp.fc.weight"
    notes = run_record.load(tmp_path).notes
    assert any(f"make record RUN={tmp_path} STEP=25" in note for note in notes)


def test_a_nan_is_caught_before_the_run_ends_and_repeated_with_everything_on(
    tmp_path: Path, texts: Path
) -> None:
    config = configuration(texts, DEFAULT, 12)
    run = start(tmp_path, config)
    run.checkpoint_due = lambda: run.iteration == 5  # type: ignore[method-assign]
    inject(run, not_a_number, 8)
    with pytest.raises(NotFiniteError):
        run.train()
    assert [
        (one["step"], one["trigger"], one["checkpoint"]) for one in read_triggers(tmp_path / "monitor")
    ] == [(8, "nan", "anomaly/00000005")]
    caught = read_series(tmp_path / "monitor/caught/step8/rank0", "grad_reduced")
    assert caught
    assert caught.values["nan"][caught.names.index("blocks.0.mlp.fc.weight")] > 0
    assert read_rows(tmp_path / "monitor/caught/step8/rank0", "param")
    assert start(tmp_path, config).train() == "finished"  # the fault was transient
    assert steps(tmp_path, "actv") == [7, 8, 9, 10]
    assert steps(tmp_path, "param") == [1, 7, 8, 9, 10, 11]
    assert (tmp_path / "monitor/caught/step8/rank0").is_dir()
    plain = small_runs.configuration(texts, 12)
    start(tmp_path / "plain", plain).train()
    assert same(outcome(tmp_path)[0], outcome(tmp_path / "plain")[0])


def test_a_compiled_run_has_the_same_bits_and_its_activations(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    plain = small_runs.configuration(texts, 4, dropout=0.2)
    plain = dataclasses.replace(plain, target=dataclasses.replace(plain.target, compile=True))
    start(tmp_path / "plain", plain, "RALEARN").train()
    start(tmp_path / "watched", dataclasses.replace(plain, monitor=EVERYTHING), "RALEARN").train()
    assert same(outcome(tmp_path / "watched"), outcome(tmp_path / "plain"))
    eager = dataclasses.replace(
        plain, monitor=EVERYTHING, target=dataclasses.replace(plain.target, compile=False)
    )
    start(tmp_path / "eager", eager, "RALEARN").train()
    for kind in ("actv", "attention"):
        compiled, expected = (
            {(row.name, row.step): row.values for row in rows(tmp_path / name, kind)}
            for name in ("watched", "eager")
        )
        assert compiled.keys() == expected.keys()
        first = [key for key in expected if key[1] == 1]
        for key in first:
            assert compiled[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


def test_a_monitor_that_cannot_write_ends_no_run(tmp_path: Path, texts: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "monitor").write_text("a file")
    assert start(directory, configuration(texts, EVERYTHING, 4)).train() == "finished"
    (note,) = [note for note in run_record.load(directory).notes if note.startswith("monitor")]
    assert "it stopped after step 1" in note
    start(tmp_path / "plain", small_runs.configuration(texts, 4)).train()
    assert same(outcome(directory), outcome(tmp_path / "plain"))


def test_at_most_two_checkpoints_are_kept(tmp_path: Path, texts: Path) -> None:
    run = start(tmp_path, small_runs.configuration(texts, 6))
    kept: list[str | None] = [keep_checkpoint(tmp_path)]
    step = run.one_step

    def one_step(feed: Any) -> None:
        step(feed)
        run.save()
        kept.extend(keep_checkpoint(tmp_path) for _ in range(2))

    run.one_step = one_step  # type: ignore[method-assign]
    run.train()
    assert kept[:7] == [None, *["anomaly/00000001"] * 2, *["anomaly/00000002"] * 2, None, None]
