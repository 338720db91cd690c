"""Random damage to every kind of file: reading returns what the file says, or a named error in one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2 import hellaswag
from gpt2.shards import Manifest, Shard, Split, read_manifest
from referee.pages.document import render_markdown, render_terminal
from runtime import checkpoint, run_plan, run_record
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.metrics_log import read_steps
from runtime.records import read, read_rows, to_plain
from runtime.settings import Config
from study import plan_file
from study.preconditions import quarantine_damaged
from study.report.report_data import as_json, build_report
from study.report.report_page import report_document, terminal_document
from study.runs import Expected
from study.study_settings import StudySettings
from study.terminal import outcome
from tests import small_runs
from tests.checked_files import write_checked
from tests.study.sample_records import a_plan, a_study

ITEM = {
    "activity_label": "Cooking",
    "ctx_a": "A cook",
    "ctx_b": "the cook",
    "endings": ["a", "b", "c", "d"],
    "label": 1,
}
CLOCKS = {"train": 1.0, "compile": 0.5, "evaluate": 0.25, "checkpoint": 0.0, "data": 0.0}
META = {
    "iteration": 3, "of": {"model": "m"}, "cut": False, "timed_steps": 3, "losses": [[128, 1.5, 9.5]],
    "learned": [], "scalars": [],
    "notes": [],    "watch": [9.5], "spikes": [], "clocks": CLOCKS, "metrics": {"bytes": 0, "sha256": "0"},
}  # fmt: skip
DAMAGES = 80  # of each file
DEEP = "@deep@"  # replaced by 100,000 brackets
HOSTILE = [
    None, True, False, 0, 1, -1, 0.5, "", "x", [], {}, [0], {"x": 0}, 10**20, 10**400, 1e101, 1e308, -1e308,
    float("nan"), float("inf"), 1e-320, "\ud800", "\0", "<script>", DEEP,
]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, smoke_config: str) -> Path:
    """A study folder with every kind of file, and a corpus and items beside it."""
    folder = tmp_path_factory.mktemp("damaged") / "s"
    a_study(folder, seeds=3, variants=("B", "RAALL", "RALEARN"))
    write_checked(
        folder / "plan.json", a_plan(classes={"standard": {"seconds_per_iteration": 0.5, "samples": [0.5]}})
    )
    write_checked(folder / "expected.json", Expected(("B", "RAALL", "RALEARN"), 3).to_json())
    for run_dir in folder.glob("runs/*"):
        small_runs.planned(run_dir, small_runs.configuration(folder, 300), run_dir.name[:-1])
        (run_dir / "config").write_text(smoke_config)
    (folder / "config").write_text(smoke_config)
    checkpoint.save(folder / "checkpoint", 3, {"model": {"w": torch.zeros(2)}}, META)
    split = Split(10, (Shard("train-0.bin", 10, "0" * 64),))
    source = {"dataset": "files", "validation_permille": 10}
    Manifest(source, "t", 2, 50256, {"train": split, "validation": split}, "hash").write(folder)
    (folder / "items.jsonl").write_text("".join(json.dumps(ITEM) + "\n" for _ in range(3)))
    return folder


@pytest.fixture(scope="module")
def smoke_config() -> str:
    from study import kconfig_commands as commands
    from study import kconfig_rules as rules

    tree = rules.load_kconfig("cpu")
    commands.configure(tree, commands.read_layers("gpt2-ra-ablation-smoke+cpu"), [])
    return rules.render(tree)


def read_configuration(path: Path) -> Any:
    symbols = read_symbols(path)
    return [Config.from_symbols(symbols), StudySettings.from_symbols(symbols)]


# file of the study -> its reader
READERS: dict[str, Callable[[Path], Any]] = {
    "runs/RALEARN0/run.json": lambda path: run_record.load(path.parent).to_json(),
    "runs/RALEARN0/metrics.jsonl": lambda path: to_plain(read_steps(path)),
    "runs/RALEARN0/rows.jsonl": lambda path: to_plain(read_rows(path.parent, ("s", "RALEARN", 0))),
    "runs/RALEARN0/plan.json": lambda path: to_plain(run_plan.load(path)),
    "plan.json": lambda path: to_plain(plan_file.read(path.parent)),
    "expected.json": lambda path: read(Expected, path).to_json(),
    "manifest.json": lambda path: to_plain(read_manifest(path.parent)),
    "checkpoint/00000003/SHA256SUMS": lambda path: checkpoint.load(path.parent).meta,
    "checkpoint/00000003/meta.json": lambda path: checkpoint.load(path.parent).meta,
    "checkpoint/00000003/state.pt": lambda path: str(checkpoint.load(path.parent).state),
    "items.jsonl": lambda path: hellaswag.load_items(path, 0),
    "config": read_configuration,
}
EXACT = ("run.json", "plan.json", "expected.json")  # their readers return the JSON in the file


def damage(draw: random.Random, content: bytes) -> bytes:
    """Flip a bit, cut the end, remove or repeat a part, or insert bytes; of JSON also replace or remove a value."""
    kinds = ["flip", "cut", "remove", "repeat", "insert", *["value"] * 5 * content.startswith(b"{")]
    kind, at = draw.choice(kinds), draw.randrange(max(1, len(content)))
    end = min(len(content), at + draw.randint(1, 30))
    if kind == "value":
        lines = content.splitlines(keepends=True)
        whole = len(lines) < 2 or lines[0].strip() == b"{"
        number = draw.randrange(len(lines))
        text = content if whole else lines[number]
        changed = damage_value(draw, json.loads(text))
        return changed if whole else b"".join([*lines[:number], changed, b"\n", *lines[number + 1 :]])
    return {
        "flip": content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :],
        "cut": content[:at],
        "remove": content[:at] + content[end:],
        "repeat": content[:end] + content[at:],
        "insert": content[:at]
        + draw.choice([b"\xff", b"[" * 100_000, b"9" * 400, b"\0", b"NaN"])
        + content[at:],
    }[kind]


def damage_value(draw: random.Random, value: Any) -> bytes:
    places: list[tuple[Any, Any]] = []  # container and key of every value
    stack = [value]
    while stack:
        node = stack.pop()
        for key, item in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(item, (dict, list)):
                stack.append(item)
    node, key = draw.choice(places)
    if draw.random() < 0.15:
        del node[key]
    else:
        node[key if draw.random() < 0.9 or isinstance(node, list) else "unknown"] = draw.choice(HOSTILE)
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode()


def contains(value: Any, part: Any) -> bool:
    """Whether `value` has every value of `part`. A reader adds the defaults of missing keys, and may leave out null."""
    if isinstance(part, dict):
        return isinstance(value, dict) and all(
            contains(value[key], item) if key in value else item is None for key, item in part.items()
        )
    if isinstance(part, list):
        return (
            isinstance(value, list)
            and len(value) == len(part)
            and all(contains(*pair) for pair in zip(value, part, strict=True))
        )
    return isinstance(value, bool) == isinstance(part, bool) and bool(value == part)


def attempt(read: Callable[[Path], Any], path: Path) -> tuple[Any, str]:
    """Return the content of a file, or the text of a named error."""
    try:
        return read(path), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("name", READERS)
def test_reading_a_damaged_file_gives_its_content_or_a_named_error(study: Path, name: str) -> None:
    path, read = study / name, READERS[name]
    content, before = path.read_bytes(), read(path)
    errors = 0
    try:
        for number in range(DAMAGES):
            draw = random.Random(f"{name} {number}")
            harmed = damage(draw, content)
            path.write_bytes(harmed)
            found, error = attempt(read, path)
            errors += bool(error)
            assert "\n" not in error, number
            if error:
                assert path.name in error or path.parent.name in error, number
            elif path.name in EXACT:
                written = json.loads(harmed)
                assert contains(found, written), number
            elif path.suffix == ".pt" or path.name == "SHA256SUMS":
                assert found == before, number
    finally:
        path.write_bytes(content)
    assert read(path) == before
    assert errors > 20 or path.name in ("metrics.jsonl", "rows.jsonl"), errors


def test_a_report_of_a_damaged_study_is_complete_and_the_damaged_files_are_moved(study: Path) -> None:
    names = [name for name in READERS if (study / name).exists() and "checkpoint" not in name]
    content = {name: (study / name).read_bytes() for name in names}
    for number in range(8):
        draw = random.Random(number)
        for name in draw.sample(names, 3):
            (study / name).write_bytes(damage(draw, content[name]))
        report = build_report(study)
        json.dumps(as_json(report), allow_nan=False)
        render_markdown(report_document(report, study)).encode()
        render_terminal(terminal_document(report)).encode()
        for folder in study.glob("runs/*"):
            outcome(folder)
        quarantine_damaged(study)
        for name in names:
            (study / name).write_bytes(content[name])
