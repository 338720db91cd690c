"""A whole study of a very small model in real processes: what `make` does. What it survives is in tests/faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2 import record

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VARIANTS": "B RALEARN",
    "SEEDS": "1",
    "GPT2_MAX_ITERS": "12",
    "EFFECTIVE_BATCH": "4",
    "GPT2_BLOCK_SIZE": "32",
    "EVAL_TOKENS": "256",
    "EVAL_INTERVAL_TOKENS": "512",
    "HELLASWAG": "n",
    "CPU_THREADS": "1",
}


@pytest.fixture
def workplace(tmp_path: Path, texts: Path) -> Path:
    """A folder with the project's code in it and a .config of a study of seconds."""
    for part in ("Kconfig", "gpt2", "ra", "study", "scripts", "defconfigs"):
        (tmp_path / part).symlink_to(ROOT / part)
    configure(tmp_path, texts)
    return tmp_path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(80):
        (folder / f"{number:02d}.txt").write_text(
            f"Story {number}: " + f"the dog {number} ran to the hill. " * 20
        )
    return folder


def command(workplace: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return kept | {"RA_DETECTED": "cpu", "PYTHONUNBUFFERED": "1"}


def configure(workplace: Path, texts: Path, **changes: str) -> None:
    values = SETTINGS | {"DATASET_FILES": str(texts / "*.txt")} | changes
    assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
    run(workplace, "scripts.kconfig", "defconfig", "gpt2-ra-ablation-smoke+cpu", *assignments, expect=0)


def run(workplace: Path, *arguments: str, expect: int) -> str:
    done = subprocess.run(
        command(workplace, *arguments),
        cwd=workplace,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def numbers(workplace: Path, name: str) -> list[object]:
    """What of a record must not depend on how the study came to its end."""
    seen = record.load(workplace / "results/gpt2-ra-ablation-smoke/runs" / name)
    history = [[tokens, loss] for tokens, _, loss in seen["validation"]["history"]]
    return [seen["status"], seen["progress"]["iterations"], history, seen["learned"], seen["fingerprint"]]


def test_a_study_runs_reports_and_then_has_nothing_to_do(workplace: Path, texts: Path) -> None:
    first = run(workplace, "scripts.study", expect=0)
    assert "CPU study" in first.splitlines()[0]
    study = workplace / "results/gpt2-ra-ablation-smoke"
    assert [numbers(workplace, name)[0] for name in ("B0", "RALEARN0")] == ["finished", "finished"]
    assert "cannot tell" in (study / "report.md").read_text()
    for name in ("config", "run.json", "metrics.jsonl", "memory.json", "log.txt", "checkpoint"):
        assert (study / "runs" / "B0" / name).exists(), name
    before = (study / "runs/B0/run.json").read_bytes()
    again = run(workplace, "scripts.study", expect=0)
    assert "nothing to run: all 2 runs" in again
    assert (study / "runs/B0/run.json").read_bytes() == before
    # another night: a seed and a variant more, the finished runs untouched
    configure(workplace, texts, SEEDS="2", VARIANTS="B RAALL RALEARN")
    run(workplace, "scripts.study", expect=0)
    assert (study / "runs/B0/run.json").read_bytes() == before
    assert len(list((study / "runs").iterdir())) == 6
    # another experiment under the same name
    configure(workplace, texts, LEARNING_RATE="2e-3")
    assert "CONFIG_LEARNING_RATE" in run(workplace, "scripts.study", expect=1)


def test_a_run_that_fails_is_recorded_and_the_others_go_on(workplace: Path, texts: Path) -> None:
    study = workplace / "results/gpt2-ra-ablation-smoke"
    (study / "runs" / "B0").mkdir(parents=True)
    (study / "runs" / "B0" / "checkpoint").write_text("in the way")  # its checkpoint cannot be written
    told = run(workplace, "scripts.study", expect=1)
    assert "not finished: B0" in told
    assert record.load(study / "runs/B0")["status"] == "failed"
    assert record.load(study / "runs/RALEARN0")["status"] == "finished"


def test_without_a_config_the_remedy_is_named(tmp_path: Path) -> None:
    for part in ("gpt2", "ra", "study", "scripts"):
        (tmp_path / part).symlink_to(ROOT / part)
    assert "make defconfig-gpt2-ra-ablation" in run(tmp_path, "scripts.study", expect=1)


def test_an_extended_study_has_the_numbers_of_a_longer_one(workplace: Path, texts: Path) -> None:
    """12 iterations, then 24; and 24 from the start with as many iterations of warm-up."""
    wsd = {"SCHEDULE_WSD": "y", "WARMUP_FRACTION": "0.25", "VARIANTS": "B"}
    assert "a cosine cannot be extended" in run(workplace, "scripts.extend", "2", expect=1)
    configure(workplace, texts, **wsd)
    assert "make extend FACTOR=2" in run(workplace, "scripts.extend", expect=1)
    run(workplace, "scripts.study", expect=0)
    short = numbers(workplace, "B0")
    configure(workplace, texts, GPT2_MAX_ITERS="24", **wsd)
    assert "make extend" in run(workplace, "scripts.study", expect=1)
    configure(workplace, texts, **wsd)
    assert "iterations: B 12 -> 24" in run(workplace, "scripts.extend", "2", expect=0)
    assert "B0 is interrupted" in run(workplace, "scripts.extend", "2", expect=1)
    configure(workplace, texts, SEEDS="2", **wsd)  # what is added is as long from its start
    assert "2 times the first budget" in run(workplace, "scripts.study", expect=0)
    names = ("B0", "B1")
    extended = [numbers(workplace, name) for name in names]
    schedules = {seen[4]["schedule"] for seen in extended}  # type: ignore[call-overload,index]
    assert len(schedules) == 1
    assert short[4]["schedule"] not in schedules  # type: ignore[call-overload,index]
    (workplace / "results").rename(workplace / "extended")
    configure(workplace, texts, SEEDS="2", GPT2_MAX_ITERS="24", **wsd | {"WARMUP_FRACTION": "0.125"})
    run(workplace, "scripts.study", expect=0)
    assert [numbers(workplace, name)[:4] for name in names] == [seen[:4] for seen in extended]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("CONFIG_FOO=1", "CONFIG_FOO"),
        ("CONFIG_SEEDS=99999", "CONFIG_SEEDS"),
        ("CONFIG_CHECKPOINT_SECONDS=0", "CONFIG_CHECKPOINT_SECONDS"),
    ],
)
def test_a_config_that_was_edited_by_hand_is_held_to_kconfigs_rules(
    workplace: Path, texts: Path, line: str, told: str
) -> None:
    name = line.partition("=")[0]
    path = workplace / ".config"
    kept = [text for text in path.read_text().splitlines() if not text.startswith(f"{name}=")]
    path.write_text("\n".join([*kept, line]) + "\n")
    said = run(workplace, "scripts.study", expect=1)
    assert told in said
    assert "error:" in said
    assert not (workplace / "results").exists()
