"""A finished record that does not agree with its checksum or its side files is named and counts nowhere."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import files, records, run_record
from runtime.errors import UserError
from runtime.run_record import RecordError
from scripts import verify as command
from study.compare import compared_studies as compare
from study.evaluation.loaded_runs import load_run
from study.report import report_data as build
from study.report import report_page as write
from study.verify import verify_study
from tests import small_runs
from tests.checked_files import write_checked, write_right
from tests.study import compared
from tests.study.report import rendered
from tests.study.sample_records import a_study
from tests.study.small_study import Place

RIGHT = [True] * 3 + [False] * 7


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def with_all_side_files(folder: Path) -> Path:
    """A sealed run of sample records with every side file."""
    record = run_record.load(folder).to_json()
    write_right(folder, "hellaswag", RIGHT)
    score = {"acc": 0.3, "acc_stderr": 0.15, "acc_norm": 0.3, "acc_norm_stderr": 0.15, "items": 10}
    (folder / "config").write_text("CONFIG_SEEDS=1\n")
    small_runs.planned(folder, small_runs.configuration(folder, 300), record["variant"], record["seed"])
    write_checked(folder / "run.json", record | {"hellaswag": score})
    return folder


def damage(folder: Path) -> list[str]:
    """What reading the run finds."""
    try:
        return run_record.altered(run_record.load(folder), folder)
    except RecordError as error:
        return [str(error)]


@pytest.fixture(scope="module")
def sealed_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = a_study(tmp_path_factory.mktemp("sealed") / "study", seeds=3)
    for folder in (study / "runs").iterdir():
        with_all_side_files(folder)
    return study


@pytest.fixture
def study(tmp_path: Path, sealed_study: Path) -> Path:
    return shutil.copytree(sealed_study, tmp_path / "study")


def test_a_process_reads_a_run_again_exactly_if_one_of_its_files_changed(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one more finished run costs the report a reading of the whole study, or damage stays unseen."""
    read, load = [], run_record.load
    monkeypatch.setattr(run_record, "load", lambda folder: read.append(folder.name) or load(folder))
    before = build.build_report(study)
    read.clear()
    assert build.build_report(study) == before
    assert not read
    metrics = study / "runs" / "B1" / "metrics.jsonl"
    flip(metrics, 0)
    assert any("B1" in line for line in build.build_report(study).damaged)
    assert read == ["B1"]
    (study / "runs" / "B2" / "metrics.jsonl").unlink()
    assert any("B2" in line for line in build.build_report(study).damaged)


def test_a_flipped_bit_anywhere_in_a_run_is_found_and_a_copy_agrees(study: Path) -> None:
    folder, draw = study / "runs" / "RALEARN0", random.Random(0)
    assert damage(folder) == []
    for name in ("run.json", *run_record.side_files(folder), records.SUMS):
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
    sums = folder / records.SUMS
    lines = sums.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):  # a list that lacks a line
        sums.write_text("".join([*lines[:number], *lines[number + 1 :]]))
        assert line.split()[1] in damage(folder)[0]
    sums.write_text("".join([*lines, f"{'0' * 64}  {'x' * 300}\n"]))
    assert "x" * 300 in damage(folder)[0]


def test_a_killed_write_of_a_finished_record_leaves_an_unfinished_run_or_a_whole_one(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = study / "runs" / "RALEARN0"
    finished = run_record.load(folder)
    (folder / records.SUMS).unlink()
    run_record.write(folder, finished.replace(status="running"))
    write = files.write_bytes
    for allowed in (0, 1):
        left = iter(range(allowed))

        def killed(path: Path, content: bytes, left: Iterator[int] = left) -> None:
            next(left)  # StopIteration: the kill
            write(path, content)

        monkeypatch.setattr(files, "write_bytes", killed)
        with pytest.raises(StopIteration):
            run_record.write(folder, finished)
        monkeypatch.undo()
        assert run_record.load(folder).status == "running"
    run_record.write(folder, finished)
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


def test_a_run_without_checksums_or_of_another_study_counts_in_no_mean(study: Path) -> None:
    runs = study / "runs"
    (runs / "RALATE0" / records.SUMS).unlink()
    value = json.loads((runs / "RALATE1" / "run.json").read_text())
    del value["sha256"]
    (runs / "RALATE1" / "run.json").write_text(json.dumps(value))
    shutil.copy(runs / "RALATE0" / records.ROWS, runs / "RALATE2" / records.ROWS)
    (runs / "RAALL0" / records.SUMS).write_text((runs / "B0" / records.SUMS).read_text())
    reasons = {run.name: run.why_not for run in build.build_report(study).runs if not run.used}
    assert {name: reason.split(";")[0] for name, reason in reasons.items()} == {
        "RAALL0": "SHA256SUMS belongs to study/B0, not to study/RAALL0",
        "RALATE0": "SHA256SUMS is missing",
        "RALATE1": f"{runs}/RALATE1/run.json is damaged: it has no checksum",
        "RALATE2": reasons["RALATE2"].split(";")[0],
    }
    assert "rows.jsonl: SHA-256 is" in reasons["RALATE2"]


def test_a_comparison_excludes_and_names_a_damaged_run(tmp_path: Path) -> None:
    folders = [compared.a_study(tmp_path / name, seeds=(0, 1, 2)) for name in ("one", "two")]
    folder = folders[1] / "runs" / "RAALL1"
    flip(folder / "metrics.jsonl", 8 * 9)
    made = compare.build_comparison(folders)
    row = next(row for row in made.absolute if row.variant == "RAALL")
    assert row.seeds == [0, 2]
    for text in (compared.markdown(made), compared.terminal(made)):
        assert "two: RAALL1 counts in no mean and no verdict: metrics.jsonl: SHA-256 is" in " ".join(
            text.split()
        )


def test_an_altered_plan_and_a_missing_one_are_not_used_and_named(finished: Place) -> None:
    assert build.build_report(finished.directory).damaged == []
    flip(finished.directory / "plan.json", 8 * 100)
    report = build.build_report(finished.directory)
    assert report.budget is None
    (plan,) = report.damaged
    assert plan.startswith("The budget and the equivalence margin of the plan are not used: ")
    assert "plan.json" in plan
    (finished.directory / "plan.json").unlink()
    (plan,) = build.build_report(finished.directory).damaged
    assert "plan.json is missing" in plan
    assert "fix: " in plan


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
        "expected.json: agrees",
        *(
            f"{name}: agrees (run.json (finished), plan.json, metrics.jsonl, rows.jsonl, items, memory.json, "
            "checkpoint/00000010, stable/00000007)"
            for name in ("B0", "RALEARN0")
        ),
        "all 4 agree",
    ]
    draw = random.Random(0)
    for path in [*sorted(finished.directory.rglob("*.json*")), *finished.directory.rglob("*.pt")]:
        content = path.read_bytes()
        flip(path, draw.randrange(8 * len(content)))
        assert command.main() == 1, path
        said = capsys.readouterr().out
        assert path.name in said or path.parent.name in said
        path.write_bytes(content)
    assert command.main() == 0


def test_a_copy_of_a_study_in_another_folder_agrees(finished: Place, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.directory, tmp_path / "elsewhere" / "copy")
    assert all(not row.problems for row in verify_study(copy))
    report = build.build_report(copy)
    assert [run.used for run in report.runs] == [True, True]
    assert report.damaged == []
