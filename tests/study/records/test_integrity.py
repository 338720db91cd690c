"""A finished record that does not agree with its seal, its side files or itself is named and counts nowhere."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.artifacts.run_record import SIDE_FILES, RecordError
from gpt2.system import files
from gpt2.system.errors import UserError
from scripts import verify as command
from study.attention.inspect import load_run
from study.compare import build as compare
from study.records.integrity import disagreements
from study.records.verify import verify_study
from study.report import build, write
from tests.study import compared
from tests.study.report import rendered
from tests.study.sample_records import STEPS, a_plan, a_study, edit
from tests.study.small_study import Place

CORRECT = [True] * 3 + [False] * 7


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def with_all_side_files(folder: Path) -> Path:
    """A sealed run of sample records with every side file."""
    record = run_record.load(folder).to_json()
    loss = record["validation"]["loss"]
    windows = {"tokens": record["progress"]["tokens"], "losses": [loss - 0.5, loss, loss + 0.5, loss]}
    files.write_json(folder / "validation_windows.json", windows)
    files.write_json(folder / "hellaswag.json", {"correct": CORRECT, "correct_norm": CORRECT})
    score = {"acc": 0.3, "acc_stderr": 0.15, "acc_norm": 0.3, "acc_norm_stderr": 0.15, "items": 10}
    (folder / "config").write_text("CONFIG_SEEDS=1\n")
    run_record.write(folder, run_record.from_json(record | {"hellaswag": score}))
    return folder


def damage(folder: Path) -> list[str]:
    """What reading the run finds."""
    try:
        return disagreements(run_record.load(folder), folder.joinpath)
    except RecordError as error:
        return [str(error)]


@pytest.fixture(scope="module")
def sealed_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = a_study(tmp_path_factory.mktemp("sealed"), seeds=3)
    for folder in (study / "runs").iterdir():
        with_all_side_files(folder)
    return study


@pytest.fixture
def study(tmp_path: Path, sealed_study: Path) -> Path:
    return shutil.copytree(sealed_study, tmp_path / "study")


def test_a_flipped_bit_anywhere_in_a_run_is_found_and_a_copy_agrees(study: Path) -> None:
    folder, draw = study / "runs" / "RALEARN0", random.Random(0)
    assert damage(folder) == []
    for name in ("run.json", *SIDE_FILES):
        path = folder / name
        content = path.read_bytes()
        for bit in draw.sample(range(8 * len(content)), min(60, 8 * len(content))):
            flip(path, bit)
            (first, *_) = damage(folder)
            assert name in first, (bit, first)
            path.write_bytes(content)
        path.unlink()
        assert name in damage(folder)[0]
        path.write_bytes(content)
    assert damage(folder) == []


def test_a_damaged_run_counts_in_no_mean_and_is_named_on_the_first_screen(study: Path) -> None:
    whole = build.build_report(study)
    flip(study / "runs" / "RALATE1" / "metrics.jsonl", 8 * 200)
    record = (study / "runs" / "RALEARN1" / "run.json").read_text()
    loss = json.loads(record)["validation"]["loss"]
    (study / "runs" / "RALEARN1" / "run.json").write_text(record.replace(f'"loss": {loss}', '"loss": 0.82'))
    made = write.write_report(study)
    assert {run.name for run in made.runs if not run.used} == {"RALATE1", "RALEARN1"}
    assert made.verdicts[0].seeds == whole.verdicts[0].seeds - 1
    for text in (rendered.terminal(made), rendered.markdown(made), (study / "report.html").read_text()):
        words = " ".join(text.replace("\\", "").split())
        for said in ("RALATE1 counts in no mean and no verdict: metrics.jsonl: SHA-256 is ",
                     "RALEARN1 counts in no mean and no verdict", "RALEARN1/run.json was altered",
                     "fix: restore the files from a copy, or delete the run"):  # fmt: skip
            assert said in words[max(0, words.find("<main")) :][:4000], said
        assert "2 of 15 runs are not counted: RALEARN1 (unreadable), RALATE1 (damaged)" in words


def unseal(study: Path) -> None:
    for path in study.glob("runs/*/run.json"):
        value = json.loads(path.read_text())
        del value["seal"]
        files.write_json(path, value)


def test_records_without_a_seal_are_named_once_and_count(study: Path) -> None:
    assert build.build_report(study).notes == []
    unseal(study)
    made = build.build_report(study)
    assert all(run.used for run in made.runs)
    (note,) = made.notes
    assert note.startswith("15 of 15 counted records have no checksum")


def change(part: str, key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_plainly(folder / "run.json", part, key, value)


def edit_plainly(path: Path, part: str, key: str, value: Any) -> None:
    content = json.loads(path.read_text())
    content[part][key] = value
    files.write_json(path, content)


def without_last_line(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")


def side_file(name: str, key: str, value: Any) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        files.write_json(folder / name, content | {key: value})

    return harm


RECORD, WINDOWS, SCORES = "run.json", "validation_windows.json", "hellaswag.json"
HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "loss": (
        change("validation", "loss", 0.82),
        f"{RECORD}: validation.loss is 0.82; the end of validation.history gives ",
    ),
    "perplexity": (
        change("validation", "perplexity", 2.27),
        f"{RECORD}: validation.perplexity is 2.27; exp(validation.loss) gives ",
    ),
    "best": (
        change("validation", "best_perplexity", 2.27),
        f"{RECORD}: validation.best_perplexity is 2.27; ",
    ),
    "tokens": (change("progress", "tokens", 5), f"{RECORD}: progress.tokens is 5; the end of "),
    "iterations": (
        change("progress", "iterations", 301),
        "metrics.jsonl: number of train lines is 300; progress.iterations gives 301",
    ),
    "seconds": (
        change("progress", "train_seconds", 7.0),
        f"{RECORD}: progress.train_seconds is 7; clock.train gives 3000",
    ),
    "speed": (
        change("throughput", "tokens_per_second", 5e5),
        f"{RECORD}: throughput.tokens_per_second is 500000; ",
    ),
    "memory": (
        change("memory", "peak_allocated_bytes", 2**40),
        f"{RECORD}: memory.peak_reserved_bytes is ",
    ),
    "accuracy": (
        change("hellaswag", "acc", 0.7),
        f"{SCORES}: mean of correct is 0.3; the accuracy in the record gives 0.7",
    ),
    "items": (
        change("hellaswag", "items", 11),
        f"{SCORES}: number of correct is 10; hellaswag.items gives 11",
    ),
    "answers": (side_file(SCORES, "correct_norm", [True] * 10), f"{SCORES}: mean of correct_norm is 1; "),
    "windows": (
        side_file(WINDOWS, "losses", [9.0] * 4),
        f"{WINDOWS}: mean of losses is 9; validation.loss gives ",
    ),
    "number of windows": (side_file(WINDOWS, "tokens", 8), f"{WINDOWS}: tokens is 8; "),
    "no losses": (side_file(WINDOWS, "losses", []), f"{WINDOWS}: entries are missing"),
    "no text": (lambda folder: (folder / SCORES).write_bytes(b"\xff"), f"{SCORES} cannot be read: not UTF-8"),
    "lines": (
        without_last_line,
        "metrics.jsonl: number of train lines is 299; progress.iterations gives 300",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_unsealed_record_is_checked_against_itself_and_its_side_files(study: Path, harm: str) -> None:
    unseal(study)
    folder, (apply, message) = study / "runs" / "RALEARN0", HARMS[harm]
    apply(folder)
    run = next(run for run in build.build_report(study).runs if run.name == "RALEARN0")
    assert (run.used, run.cause) == (False, "damaged")
    assert message in run.why_not


def test_a_comparison_excludes_and_names_a_damaged_run(tmp_path: Path) -> None:
    folders = [compared.a_study(tmp_path / name, seeds=(0, 1, 2)) for name in ("one", "two")]
    edit_plainly(folders[1] / "runs" / "RAALL1" / "run.json", "validation", "perplexity", 2.27)
    made = compare.build_comparison(folders)
    row = next(row for row in made.absolute if row.variant == "RAALL")
    assert row.seeds == [0, 2]
    for text in (compared.markdown(made), compared.terminal(made)):
        assert (
            "two: RAALL1 counts in no mean and no verdict: run.json: validation.perplexity is 2.27"
            in " ".join(text.split())
        )


def test_an_altered_plan_and_altered_attention_maps_are_not_used_and_named(finished: Place) -> None:
    assert build.build_report(finished.directory).damaged == []
    flip(finished.directory / "plan.json", 8 * 100)
    (finished.directory / "attention.json").write_text(
        '{"schema": 1, "seal": {"files": {}, "this_file": "0"}}'
    )
    report = build.build_report(finished.directory)
    assert report.budget is None
    plan, attention = report.damaged
    assert plan.startswith("The budget and the equivalence margin of the plan are not used: ")
    assert "plan.json" in plan
    assert "Attention maps are not shown: " in attention
    assert all("fix: " in line for line in report.damaged)


def test_attention_refuses_a_damaged_run(finished: Place) -> None:
    path = finished.folder("B") / "metrics.jsonl"
    flip(path, 8 * (path.stat().st_size - 9))
    with pytest.raises(UserError, match=r"B0 is damaged: metrics\.jsonl: SHA-256 is .*; fix: restore"):
        load_run(finished.folder("B"))


def test_verify_has_a_line_for_every_run_and_fails_where_one_does_not_agree(
    finished: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.report.command_arguments", lambda **names: [str(finished.directory)])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    assert command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "plan.json: agrees",
        *(
            f"{name}: agrees (run.json (finished, sealed), metrics.jsonl, validation_windows.json, memory.json, "
            "checkpoint/00000010, stable/00000007)"
            for name in ("B0", "RALEARN0")
        ),
        "all 3 agree",
    ]
    draw = random.Random(0)
    paths = [path for path in sorted(finished.directory.rglob("*.json*")) if path.name != "expected.json"]
    for path in [*paths, *finished.directory.rglob("*.pt")]:
        content = path.read_bytes()
        flip(path, draw.randrange(8 * len(content)))
        assert command.main() == 1, path
        said = capsys.readouterr().out
        assert path.name in said or path.parent.name in said
        path.write_bytes(content)
    assert command.main() == 0


def test_verify_reads_every_line_of_metrics(study: Path) -> None:
    files.write_json(study / "plan.json", a_plan())
    assert [row.problems for row in verify_study(study)] == [[]] * 16
    unseal(study)
    path = study / "runs" / "B0" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"iteration": 77,', '"iteration": 78,'))
    row = next(row for row in verify_study(study) if row.name == "B0")
    assert row.problems == ["metrics.jsonl: iteration of train line 77 is 78; its place gives 77"]


def test_a_copy_of_a_study_in_another_folder_agrees(finished: Place, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.directory, tmp_path / "elsewhere" / "copy")
    assert all(not row.problems for row in verify_study(copy))
    report = build.build_report(copy)
    assert [run.used for run in report.runs] == [True, True]
    assert report.damaged == []


def test_numbers_of_the_sample_are_not_trivial(study: Path) -> None:
    """The harms above are found for their reason, not because the sample disagrees anyway."""
    unseal(study)
    edit(study, "B0", validation={"loss": 3.9})
    assert math.isclose(
        json.loads((study / "runs/B0/run.json").read_text())["validation"]["perplexity"], math.exp(3.9)
    )
    shown = [run for run in build.build_report(study).runs if not run.used]
    assert [run.name for run in shown] == ["B0"]
    assert "validation_windows.json: mean of losses" in shown[0].why_not
    assert STEPS == 300
