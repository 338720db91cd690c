"""A training process reaches its first step without the packages that it does not need."""

from pathlib import Path
from typing import Any

import pytest

from bench.suites import startup
from bench.workers import BenchError
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small
from tests.small_runs import write_texts

SMALL = {"VARIANTS": "RALEARN", "CPU_THREADS": "1"}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Start the training process of the smoke study twice, up to the end of its first step."""
    texts = write_texts(tmp_path_factory.mktemp("texts"), times=40)
    files = {"DATASET_FILES": str(texts / "*.txt"), "DATASET_LOCAL": "y"}
    place: Path = tmp_path_factory.mktemp("place")
    return startup.measure(place, "gpt2-ra-ablation-smoke", 2, **SMALL | files)


def test_no_heavy_package_is_loaded_by_a_training_process(starts: list[dict[str, Any]]) -> None:
    assert {"datasets", "wandb", "transformers", "plotly"} <= set(startup.HEAVY)
    assert [row["loaded"] for row in starts] == [[], []]


def test_the_parts_add_up_to_the_total(starts: list[dict[str, Any]]) -> None:
    for row in starts:
        assert sum(row[part] for part in startup.PARTS) == pytest.approx(row["total"])
        assert all(row[part] > 0 for part in startup.PARTS)
    table = startup.table({"smoke": starts})
    assert table.cells[0][:2] == ("smoke", "2")
    assert "heavy packages loaded: none" in str(table)
    assert "compiled" not in str(table)


def test_with_compiled_kernels_the_first_process_is_listed_separately() -> None:
    def start(total: float) -> dict[str, Any]:
        return dict.fromkeys(startup.PARTS, total / len(startup.PARTS)) | {
            "total": total,
            "loaded": [],
            "compiles": True,
        }

    table = startup.table({"study": [start(60.0), start(6.0), start(12.0), start(9.0)]})
    assert table.cells[0][:3] == ("study", "3", "9.00 [6.00, 12.00]")
    assert "study: the first process compiled the kernels; its first step came at 60.00 s" in table.notes
    assert startup.table({"study": [start(60.0)]}).cells[0][:3] == ("study", "1", "60.00 [60.00, 60.00]")


def test_a_study_that_does_not_start_is_skipped_and_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(folder: Path, name: str, rounds: int, **values: str) -> list[dict[str, Any]]:
        if values or fails:
            raise BenchError("no compiler")
        times = dict.fromkeys(startup.PARTS, 1.0) | {"total": 6.0, "loaded": [], "compiles": False}
        return [times] * rounds

    fails = False
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored after the test
    monkeypatch.setattr(startup, "measure", measure)
    found = run_small(startup.SUITE, tmp_path, monkeypatch, rounds=2)
    assert [*found["starts"]] == ["gpt2-ra-ablation-smoke", "gpt2-ra-ablation"]
    assert "skipped: gpt2-ra-ablation-smoke CONFIG_COMPILE=y: no compiler" in capsys.readouterr().out
    fails = True
    with pytest.raises(UserError, match="no study could be started"):
        run_small(startup.SUITE, tmp_path, monkeypatch)
