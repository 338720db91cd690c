"""One run over 1, 2 and 4 processes: equal numbers, one record, and what happens on one rank happens on all."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from referee.numerics.monitor.targets import KINDS
from runtime import records, run_record
from runtime.batch_plan import BatchError, plan_batch, plan_for
from tests import small_runs
from tests.gpt2 import rank_runs
from tests.referee.numerics.monitor.table_rows import read_rows
from tests.small_runs import StopAfter, outcome, same

pytestmark = pytest.mark.slow
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2, "name": "RALEARN"},
    "resumed": {},  # with another number of ranks before
    "stop": {"then": "stop"},
    "monitored": {"monitor": True},
    "nan": {"then": "nan"},
    "oom": {"then": "oom"},
    "data": {"then": "data"},
}


def specs(root: Path, texts: Path, names: list[str]) -> list[dict[str, Any]]:
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    return [SPECS[name] | {"directory": str(root / name), "texts": str(texts)} for name in names]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Train in this process with as many threads as each rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """Return the folder of the runs of one process."""
    root = tmp_path_factory.mktemp("alone")
    for spec in specs(root, texts, ["plain", "dropout"]):
        assert rank_runs.start(spec).train() == "finished"
    return root


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> tuple[Path, Path]:
    """Return the folders of the runs of two and of four ranks."""
    two, four = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("four")
    for spec in specs(two, texts, ["resumed"]):
        run = rank_runs.start(spec)
        run.stop = StopAfter(5)
        assert run.train() == "interrupted"
        assert 0 < run.iteration < rank_runs.ITERATIONS
    runs = {2: specs(two, texts, list(SPECS)), 4: specs(four, texts, ["plain"])}
    subprocess.run([sys.executable, "-m", "tests.gpt2.rank_runs", json.dumps(runs)], check=True)
    return two, four


@pytest.fixture(scope="module")
def two(several: tuple[Path, Path]) -> Path:
    return several[0]


@pytest.mark.parametrize(("name", "world"), [("plain", 2), ("dropout", 2), ("plain", 4)])
def test_one_process_replays_several_ranks_to_the_bit(
    name: str, world: int, several: tuple[Path, Path], tmp_path: Path, texts: Path
) -> None:
    (spec,) = specs(tmp_path, texts, [name])
    assert rank_runs.start(spec, simulated=world).train() == "finished"
    ranks = several[world // 4] / name
    assert same(outcome(tmp_path / name)[2], outcome(ranks)[2])
    assert same(outcome(tmp_path / name)[0], outcome(ranks)[0])
    assert scores(tmp_path / name) == scores(ranks)
    assert run_record.load(ranks).batch == run_record.Batch(16, 2, 8 // world, world, 16)


def of_rank(root: Path, name: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / name / f"rank{rank}.json").read_text())
    return found


def scores(directory: Path) -> Any:
    record = run_record.load(directory)
    return (
        record.hellaswag,
        record.validation and record.validation.loss,
        [path.read_bytes() for path in sorted(directory.glob(f"{records.ITEMS}/*"))],
    )


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_two_ranks_have_the_numbers_of_one_within_rounding(alone: Path, two: Path, name: str) -> None:
    close(two / name, alone / name)


def test_every_rank_monitors_its_gradients_before_and_after_the_reduction(two: Path) -> None:
    assert same(outcome(two / "plain"), outcome(two / "monitored"))
    before, after = (
        [read_rows(two / f"monitored/monitor/rank{rank}", kind) for rank in range(2)]
        for kind in ("grad_unreduced", "grad_reduced")
    )
    assert after[0] == after[1]
    assert [row.name for row in before[0]] == [row.name for row in after[0]]
    mean = KINDS["grad_reduced"].index("mean")
    assert before[0][0].values != before[1][0].values
    for one, other, summed in zip(before[0], before[1], after[0], strict=True):
        assert one.values[mean] + other.values[mean] == pytest.approx(summed.values[mean], rel=1e-3, abs=1e-8)


def test_the_number_of_ranks_may_change_at_a_resume(alone: Path, two: Path, texts: Path) -> None:
    close(two / "resumed", alone / "plain")
    assert [of_rank(two, "stop", rank)["status"] for rank in range(2)] == ["interrupted", "interrupted"]
    assert run_record.load(two / "stop").progress.iterations == 4
    spec = {"directory": str(two / "stop"), "texts": str(texts)}
    assert rank_runs.start(spec).train() == "finished"
    close(two / "stop", alone / "plain")


def close(one: Path, other: Path) -> None:
    """Compare losses, validation, and every tensor of the last checkpoint, to float rounding."""

    (state, found, losses), (expected, exact, others) = outcome(one), outcome(other)
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in others], rel=2e-6)
    assert [loss for _, loss in found["losses"]] == pytest.approx(
        [loss for _, loss in exact["losses"]], rel=2e-6
    )
    assert found["fingerprint"] == exact["fingerprint"]
    assert state["model"].keys() == expected["model"].keys()
    for name, value in state["model"].items():
        torch.testing.assert_close(value, expected["model"][name], rtol=1e-3, atol=1e-4)
    for number, entry in expected["optimizer"]["state"].items():
        torch.testing.assert_close(state["optimizer"]["state"][number], entry, rtol=1e-2, atol=1e-5)


def test_one_rank_writes_one_record_and_all_have_its_weights(two: Path) -> None:
    assert of_rank(two, "plain", 0) == of_rank(two, "plain", 1)
    assert sorted(path.name for path in (two / "plain").iterdir()) == sorted(
        ["SHA256SUMS", "checkpoint", "items", "memory.json", "metrics.jsonl", "plan.json", "rank0.json",
         "rank1.json", "rows.jsonl", "run.json"]
    )  # fmt: skip
    lines = (two / "plain" / "metrics.jsonl").read_text().splitlines()
    assert sum('"train"' in line for line in lines) == rank_runs.ITERATIONS


def test_a_step_of_one_rank_that_is_not_finite_is_found_by_all(two: Path) -> None:
    """Rank 1 has the micro-batches 4 to 7 of the effective batch, which are its sequences 8 to 15."""
    one, other = (of_rank(two, "nan", rank) for rank in range(2))
    assert one == other
    assert one["error"].startswith("NotFiniteError: iteration 3: ")
    assert one["iteration"] == 3
    (fault,) = one["faults"]
    assert (fault["what"], fault["name"], fault["micro_batch"]) == ("output", "blocks.1.mlp.fc", 4)
    assert len(fault["sequences"]) == rank_runs.MICRO


def test_one_rank_without_memory_ends_the_step_of_all(two: Path) -> None:
    errors = [of_rank(two, "oom", rank)["error"] for rank in range(2)]
    assert errors == ["MemoryError: another rank ran out of memory", "OutOfMemoryError: injected"]
    assert [of_rank(two, "oom", rank)["iteration"] for rank in range(2)] == [3, 3]


def test_a_rank_with_other_data_is_refused_before_the_first_step(two: Path) -> None:
    one, other = (of_rank(two, "data", rank) for rank in range(2))
    assert one["error"] == other["error"]
    assert "rank 1 has data another, rank 0 has data " in one["error"]
    assert one["iteration"] == 0
    assert not (two / "data" / "metrics.jsonl").exists()


def test_a_plan_for_other_ranks_keeps_the_effective_batch() -> None:
    plan = plan_batch(16, 8, 1, 16)
    assert dataclasses.astuple(plan_for(plan, 4)) == (16, 4, 1, 4, 16)
    assert dataclasses.astuple(plan_for(plan_for(plan, 4), 1)) == (16, 4, 4, 1, 16)
    assert plan_for(plan, 1) is plan
    with pytest.raises(BatchError, match="3 processes cannot share effective batch 16 evenly"):
        plan_for(plan, 3)
    assert small_runs.configuration(Path("texts"), 1).target.ranks == 1
