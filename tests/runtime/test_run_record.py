import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import files, records, run_record
from runtime.metrics_log import MetricsLog, last_lines
from runtime.records import InvalidJsonError


def full() -> dict[str, Any]:
    hashes = dict.fromkeys(run_record.Fingerprint.__struct_fields__, "ab") | {"numbers": 1}
    return run_record.blank("RALEARN0", "RALEARN", 0).to_json() | {
        "status": "finished",
        "fingerprint": hashes,
        "target": {
            "name": "cpu", "device": "a processor", "memory_bytes": 1, "dtype": "float32",
            "attention_backend": "flash", "torch": "2.13.0", "driver": None,
        },
        "batch": {"effective": 512, "micro": 32, "accumulation": 16, "world_size": 1, "block_size": 1024},
        "parameters": 124439808,
        "progress": {"iterations": 10, "tokens": 1000, "train_seconds": 1.5},
        "clock": {"train": 1.5, "compile": 1, "evaluate": 0.5, "checkpoint": 0.1, "data": 0.0},
        "validation": {
            "loss": 3.2, "perplexity": 24.5, "best_perplexity": 24.5, "tokens": 4096, "history": [[1000, 1.5, 3.2]],
            "bytes": 4000, "bits_per_byte": 4.7,
        },
        "hellaswag": {"acc": 0.3, "acc_stderr": 0.01, "acc_norm": 0.31, "acc_norm_stderr": 0.01, "items": 10042,
                      "items_sha256": "ab"},
        "memory": {
            "peak_allocated_bytes": 1, "peak_reserved_bytes": 2, "predicted_bytes": None,
            "by_phase": {"forward": 1, "backward": 1, "optimizer": None},
        },
        "throughput": {"tokens_per_second": 100.0, "mfu": None},
        "learned": {"alternation_probability": [0.5, 0.4], "history": [[1000, [0.5, 0.4]]]},
        "scalars": [[1000, "lambda", [0.5, -1.5]], [1000, "beta", [None]]],
        "schedule": {"iterations": 10, "cut": False},
    }  # fmt: skip


def reads(value: Any) -> bool:
    """Whether the record can be read; then it is written as it was read."""
    try:
        record = run_record.from_json(value)
    except InvalidJsonError:
        return False
    assert run_record.from_json(record.to_json()) == record
    return True


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-2, 2), st.text(max_size=3),
    st.just([]), st.just({}), st.just({"absent": "no network"}), st.just("finished"), st.just([1, 2.0]),
    st.lists(st.one_of(st.integers(-1, 2), st.none(), st.lists(st.floats(-1, 2), max_size=2)), max_size=4),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(place=st.sampled_from(places(full())[1:]), odd=ODD, remove=st.booleans(), extra=st.booleans())
def test_a_changed_record_is_refused_or_read_as_it_is_written(
    place: tuple[Any, ...], odd: Any, remove: bool, extra: bool
) -> None:
    value = copy.deepcopy(full())
    holder: Any = value
    for key in place[:-1]:
        holder = holder[key]
    if remove and isinstance(holder, dict):
        del holder[place[-1]]
    else:
        holder[place[-1]] = odd
    if extra and isinstance(holder, dict):
        holder["unheard_of"] = odd
    assert not (reads(value) and extra and isinstance(holder, dict) and "variables" not in place[:-1])


def test_a_written_record_is_read_unchanged(tmp_path: Path) -> None:
    run_record.write(tmp_path, run_record.from_json(full()))
    record = run_record.load(tmp_path)
    assert record == run_record.from_json(full()).replace(study=record.study)
    assert run_record.from_json(record.to_json()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == [records.SUMS, "run.json"]


@pytest.mark.parametrize("status", ["running", "interrupted", "failed", "finished"])
def test_a_changed_digit_of_any_record_is_noticed(status: str, tmp_path: Path) -> None:
    """The clocks of an unfinished record are those of its continuation."""
    run_record.write(tmp_path, run_record.from_json(full() | {"status": status}))
    content = bytearray((tmp_path / "run.json").read_bytes())
    content[content.index(b'"train": ') + len(b'"train": ')] ^= 1
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(run_record.RecordError, match="was altered"):
        run_record.load(tmp_path)


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    value = full()
    value["validation"]["loss"] = math.nan
    value["validation"]["perplexity"] = math.inf
    records.write(tmp_path / "run.json", value)
    validation = run_record.load(tmp_path).validation
    assert validation
    assert validation.loss is None
    assert validation.perplexity is None


def test_the_name_of_a_file_that_is_no_utf_8_is_written_with_escapes(tmp_path: Path) -> None:
    """The error of a run that failed on such a file is on record, and the failure is not hidden by another one."""
    name = os.fsdecode(b"texts/caf\xe9.txt")
    error = f"FileNotFoundError: {name}"
    failed = run_record.from_json(full()).replace(status="failed", error=error, notes=(name,))
    run_record.write(tmp_path, failed)
    record = run_record.load(tmp_path)
    assert (record.error, record.notes) == (
        r"FileNotFoundError: texts/caf\udce9.txt",
        (r"texts/caf\udce9.txt",),
    )
    log = MetricsLog(tmp_path, failed)
    log.write("failed", error, {})
    with log:
        log.note(1, error)
    files.write_json(tmp_path / "exit.json", {"status": 1, "answer": {name: name}})
    assert files.read_json(tmp_path / "exit.json")["answer"] == {record.notes[0]: record.notes[0]}
    assert last_lines(tmp_path)["note"].message == record.error == run_record.load(tmp_path).error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ({"schema": 2}, "is of schema 2; this version reads schema 1"),
        ({"schema": 1}, "does not follow the schema: "),
        ('{"schema": 1}', "it has no checksum"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_an_unusable_record_is_refused_with_its_path(
    tmp_path: Path, content: str | dict[str, Any] | None, message: str
) -> None:
    if isinstance(content, dict):
        records.write(tmp_path / "run.json", content)
    elif content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(run_record.RecordError, match=message) as caught:
        run_record.load(tmp_path)
    assert "run.json" in str(caught.value)


@given(st.lists(st.tuples(st.sampled_from(["B", "RAALL", "RA:1", "RA:11", "RA:1-2,3", "X2"]), st.integers(0, 111)),
                min_size=2, max_size=2, unique=True))  # fmt: skip
def test_each_run_has_a_separate_folder(runs: list[tuple[str, int]]) -> None:
    names = {run_record.run_name(*run) for run in runs}
    assert len(names) == 2
    assert not any(set(name) & set("/:, ") for name in names)
