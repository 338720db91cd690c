"""Test `make clean` and `make mrproper`: they remove files that make can create again, and no other file."""

import fcntl
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.shards import Manifest, Shard, Split
from runtime.errors import UserError
from scripts.dev import clean
from study.kconfig_rules import HEADER

KEY = "0123456789ab"
MRPROPER = ("caches", "data", "config", "venv")


def write(path: Path | str, text: str = "") -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return Path(path)


def write_corpus(folder: Path) -> None:
    """A prepared corpus with one shard of each split."""
    splits = {}
    for split in ("train", "validation"):
        write(folder / f"{split}-000.bin")
        splits[split] = Split(0, (Shard(f"{split}-000.bin", 0, ""),))
    Manifest({"dataset": "embedded", "validation_permille": 50}, "", 0, 0, splits, "").write(folder)


def write_everything(root: Path) -> None:
    """Every kind of file that the commands write, one source, a download and two studies."""
    write_corpus(root / f"data/embedded-{KEY}")
    for name, text in {
        "gpt2/transformer.py": "",
        "gpt2/__pycache__/model.pyc": "",
        ".pytest_cache/CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55",
        ".venv/pyvenv.cfg": "home = /usr/bin",
        f"data/.embedded-{KEY}.lock": "",
        f"data/.embedded-{KEY}.4711.tmp/train-000.bin": "",
        f"data/.admission-{KEY}0123.json": '{"variant": "B", "violations": []}',
        "data/hellaswag_val.jsonl": "downloaded",
        "results/night/runs/B0/run.json": "",
        "results/night/lock": "",
        "results/begun/lock": "",
        ".config": HEADER,
        ".config.old": HEADER,
        "defconfig": "# Saved from .config with the defaults for cpu\n",
    }.items():
        write(root / name, text)


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    write_everything(root)
    monkeypatch.chdir(root)
    return root


def configure(**symbols: str) -> None:
    Path(".config").write_text("".join(f'CONFIG_{name}="{value}"\n' for name, value in symbols.items()))


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


RESULTS = ["results/begun/lock", "results/night/lock", "results/night/runs/B0/run.json"]


def test_mrproper_removes_what_make_wrote_and_keeps_results_and_downloads() -> None:
    assert clean.main(["caches", "data"]) == 0
    assert files() == [
        ".config", ".config.old", ".venv/pyvenv.cfg", "data/hellaswag_val.jsonl", "defconfig",
        "gpt2/transformer.py", *RESULTS,
    ]  # fmt: skip
    assert clean.main([*MRPROPER]) == 0
    assert files() == ["data/hellaswag_val.jsonl", "gpt2/transformer.py", *RESULTS]


@pytest.mark.parametrize(
    "name",
    [
        ".config",
        ".config.old",
        "defconfig",
        ".venv/notes.txt",
        "gpt2/__pycache__/notes.txt",
        f"data/.embedded-{KEY}.4711.tmp/notes.txt",
        f"data/embedded-{KEY}/mine.txt",
        f"data/other-{KEY}/train-000.bin",
        "data/my_texts.jsonl",
        "results/night/runs/photo.jpg",
    ],
)
def test_a_file_of_the_user_stays_under_every_name(name: str) -> None:
    for path in (Path(name), Path(name).parent):
        if path != Path() and path.is_dir() and path.name.startswith(".venv"):
            shutil.rmtree(path)
        if path.is_file():
            path.unlink()
    write(name, "mine")
    clean.main([*MRPROPER])
    assert Path(name).read_text() == "mine"


@pytest.mark.parametrize("place", ["results", ".", "gpt2"])
def test_results_and_sources_in_the_data_folder_are_not_removed(place: str) -> None:
    configure(DATA_DIR=place)
    clean.main(["data"])
    assert Path("results/night/runs/B0/run.json").exists()
    assert Path("gpt2/transformer.py").exists()


def test_a_folder_outside_the_project_is_named_and_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_everything(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    configure(DATA_DIR=str(tmp_path / "elsewhere/data"))
    clean.main(["data"])
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert "it is outside this folder" in capsys.readouterr().out


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside / "__pycache__/a.pyc")
    write_everything(outside)
    before = sorted(outside.rglob("*"))
    for link in ("gpt2/link", f"data/embedded-{KEY}/link", "data/files-0123456789ab", f"data/.x-{KEY}.1.tmp"):
        Path(link).symlink_to(outside)
    clean.main([*MRPROPER])
    assert sorted(outside.rglob("*")) == before
    shutil.rmtree("data")
    Path("data").symlink_to(outside / "data")
    clean.main(["data"])
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("lock", ["results/night/lock", "elsewhere/x/lock", f"data/.embedded-{KEY}.lock"])
def test_nothing_is_removed_while_a_study_or_a_preparation_runs(lock: str, checkout: Path) -> None:
    Path(".config").write_text(HEADER + 'CONFIG_RESULTS_DIR="elsewhere"\n')
    with write(lock).open() as file:
        before = sorted(checkout.rglob("*"))
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="nothing is removed; fix: wait for it or stop it"):
            clean.main([*MRPROPER])
        assert sorted(checkout.rglob("*")) == before
    clean.main([*MRPROPER])
    assert not Path(".config").exists()


def test_tracked_files_remain_in_every_folder() -> None:
    tracked = [
        Path("defconfig"),
        Path("gpt2/__pycache__/model.pyc"),
        Path(f"data/embedded-{KEY}/train-000.bin"),
    ]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "-f", *map(str, tracked)], check=True)
    clean.main([*MRPROPER])
    assert all(path.exists() for path in tracked)


# Folders in which no file is written by a command, folders of commands, and names of files.
PLACES = (
    "",
    "texts",
    "gpt2",
    "docs",
    "data",
    f"data/embedded-{KEY}",
    "data/books-202611220830",
    "results",
    "results/mine",
)
NAMES = ("a.txt", "notes.md", "hellaswag_train.jsonl", "it's a $text.jsonl")


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_files_of_the_user_remain_in_every_folder(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    """Whatever the configuration."""
    root = tmp_path_factory.mktemp("random")
    write_everything(root)
    mine = [write(root / rng.choice(PLACES) / rng.choice(NAMES), "mine") for _ in range(5)]
    folders = {name: rng.choice([*PLACES[1:], "."]) for name in ("DATA", "RESULTS")}
    write(root / ".config", "".join(f'CONFIG_{name}_DIR="{folder}"\n' for name, folder in folders.items()))
    before = Path.cwd()
    os.chdir(root)
    try:
        clean.main([*MRPROPER])
    finally:
        os.chdir(before)
    assert [path.read_text() for path in mine] == ["mine"] * 5
