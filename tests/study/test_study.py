"""`make` with a very small model; one study and its training are processes. For its faults see tests/faults."""

import json
from pathlib import Path

import pytest

from runtime import run_plan, run_record
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VARIANTS": "B RALEARN",
    "GPT2_MAX_ITERS": "12",
    "MICRO_BATCH": "0",
    "EVAL_INTERVAL_TOKENS": "256",
    "CHECKPOINT_SECONDS": "30",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def place(tmp_path: Path, texts: Path) -> Workplace:
    return Workplace(tmp_path, texts, **SETTINGS)


def configure(place: Workplace, **changes: str) -> None:
    place.configure(**SETTINGS | changes)


def run(place: Workplace, *arguments: str, expect: int) -> str:
    done = train(place) if arguments == ("scripts.study",) else place.here(*arguments)
    assert done.returncode == expect, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"NUMERICS_FIX": "small:blocks.0.mpl"},
            "arm B: CONFIG_NUMERICS_FIX: small:blocks.0.mpl matches no module and no function; fix: did you mean",
        ),
        (
            {"NUMERICS_FIX": "cpu:blocks.0.mlp"},
            "arm B: CONFIG_NUMERICS_FIX: cpu:blocks.0.mlp has no effect: the runs compute on the CPU; fix: remove it",
        ),
        (
            {"MONITOR": "y", "MONITOR_TARGETS": "param grad:nosuch"},
            "CONFIG_MONITOR_TARGETS: grad:nosuch matches no trained parameter of the model; fix: ",
        ),
    ],
)  # fmt: skip
def test_a_name_that_no_model_has_ends_a_study_before_its_plan(
    place: Workplace, settings: dict[str, str], message: str
) -> None:
    configure(place, **settings)
    printed = run(place, "scripts.study", expect=1)
    assert f"error: {message}" in printed
    assert not (place.study / "plan.json").exists()


def test_a_study_runs_writes_its_report_and_a_second_make_runs_nothing(place: Workplace) -> None:
    configure(place, VARIANTS="B")
    first = place.command("scripts.study")
    assert first.returncode == 0, first.stdout
    assert "CPU study" in first.stdout.splitlines()[0]
    study = place.study
    assert place.status("B0") == "finished"
    for name in ("config", "plan.json", "run.json", "metrics.jsonl", "memory.json", "log.txt", "checkpoint"):
        assert (study / "runs" / "B0" / name).exists(), name
    before = (study / "runs/B0/run.json").read_bytes()
    second = run(place, "scripts.study", expect=0)
    assert "nothing to run: all 1 runs" in second
    assert (study / "runs/B0/run.json").read_bytes() == before
    # a job that waited in a cluster's queue while the run was finished elsewhere
    assert run(place, "scripts.train", str(study / "runs/B0/plan.json"), expect=0) == ""
    assert (study / "runs/B0/run.json").read_bytes() == before
    # a further session with another seed and another variant: the finished run is unchanged
    configure(place, SEEDS="2")
    run(place, "scripts.study", expect=0)
    assert (study / "runs/B0/run.json").read_bytes() == before
    names = ("B0", "B1", "RALEARN0", "RALEARN1")
    assert [place.status(name) for name in names] == ["finished"] * 4
    assert "cannot tell" in (study / "report.md").read_text()
    # another experiment under the same name
    configure(place, LEARNING_RATE="2e-3")
    assert "CONFIG_LEARNING_RATE" in run(place, "scripts.study", expect=1)


def test_all_sessions_of_a_study_use_one_set_of_hellaswag_items(place: Workplace, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    lines = (ROOT / "tests/fixtures/hellaswag_small.jsonl").read_text(encoding="utf-8").splitlines()
    items.write_text("\n".join(lines), encoding="utf-8")
    few = {
        "VARIANTS": "B",
        "GPT2_MAX_ITERS": "4",
        "HELLASWAG": "y",
        "HELLASWAG_FILE": str(items),
        "HELLASWAG_LIMIT": "3",
    }
    configure(place, **few)
    run(place, "scripts.study", expect=0)
    scored = run_record.load(place.study / "runs/B0").hellaswag
    assert scored.items == 3
    assert run_plan.load(place.study / "runs/B0/plan.json").hellaswag == items
    configure(place, SEEDS="2", **few)
    edited = json.loads(lines[0])
    edited["label"] = (int(edited["label"]) + 1) % 4
    items.write_text("\n".join([json.dumps(edited), *lines[1:]]), encoding="utf-8")
    output = run(place, "scripts.study", expect=1)
    assert f"{items} gives 3 items" in output
    assert "B0 was scored on 3 items" in output
    assert not (place.study / "runs/B1").exists()
    items.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")  # the same questions
    run(place, "scripts.study", expect=0)
    assert run_record.load(place.study / "runs/B1").hellaswag.items_sha256 == scored.items_sha256


def test_a_failed_run_is_recorded_and_the_others_continue(place: Workplace) -> None:
    study = place.study
    (study / "runs" / "B0").mkdir(parents=True)
    (study / "runs" / "B0" / "checkpoint").write_text("in the way")  # its checkpoint cannot be written
    output = run(place, "scripts.study", expect=1)
    assert "not finished: B0" in output
    assert run_record.load(study / "runs/B0").status == "failed"
    assert run_record.load(study / "runs/RALEARN0").status == "finished"


def test_without_a_config_the_fix_is_named(place: Workplace) -> None:
    (place.folder / ".config").unlink()
    assert "make defconfig-gpt2-ra-ablation" in run(place, "scripts.study", expect=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("CONFIG_FOO=1", "CONFIG_FOO"),
        ("CONFIG_SEEDS=99999", "CONFIG_SEEDS"),
        ("CONFIG_CHECKPOINT_SECONDS=0", "CONFIG_CHECKPOINT_SECONDS"),
    ],
)
def test_a_manually_edited_config_is_checked_against_kconfig(
    place: Workplace, line: str, message: str
) -> None:
    name = line.partition("=")[0]
    path = place.folder / ".config"
    saved = [text for text in path.read_text().splitlines() if not text.startswith(f"{name}=")]
    path.write_text("\n".join([*saved, line]) + "\n")
    output = run(place, "scripts.study", expect=1)
    assert message in output
    assert "error:" in output
    assert not (place.folder / "results").exists()
