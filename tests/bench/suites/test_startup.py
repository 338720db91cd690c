"""A training process reaches its first step without the packages that it does not need."""

from pathlib import Path
from typing import Any

import pytest

from scripts import bench_first_step as bench
from tests.small_runs import write_texts

SMALL = {"VARIANTS": "RALEARN", "CPU_THREADS": "1"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two starts of the smoke study's own training process, up to the end of its first step."""
    texts = write_texts(tmp_path_factory.mktemp("texts"), times=40)
    files = {"DATASET_FILES": str(texts / "*.txt"), "DATASET_LOCAL": "y"}
    place: Path = tmp_path_factory.mktemp("place")
    return bench.measure(place, "gpt2-ra-ablation-smoke", 2, **SMALL | files)


def test_no_heavy_package_is_loaded_by_a_training_process(seen: list[dict[str, Any]]) -> None:
    assert {"datasets", "wandb", "transformers", "plotly"} <= set(bench.HEAVY)
    assert [row["loaded"] for row in seen] == [[], []]


def test_the_parts_are_all_there_is(seen: list[dict[str, Any]]) -> None:
    for row in seen:
        assert sum(row[part] for part in bench.PARTS) == pytest.approx(row["total"])
        assert all(row[part] > 0 for part in bench.PARTS)
    shown = bench.text("smoke", seen)
    assert "median of 2" in shown
    assert "heavy packages loaded: none" in shown
    assert "compiled" not in shown


def test_where_kernels_are_compiled_the_first_process_is_told_apart() -> None:
    def start(total: float) -> dict[str, Any]:
        return dict.fromkeys(bench.PARTS, total / len(bench.PARTS)) | {
            "total": total,
            "loaded": [],
            "compiles": True,
        }

    shown = bench.text("compiled", [start(60.0), start(6.0), start(12.0), start(9.0)])
    assert "first step after 9.00 s [6.00, 12.00], median of 3" in shown
    assert "a process before them compiled: its first step came after 60.00 s" in shown
    assert "median of 1" in bench.text("compiled", [start(60.0)])
