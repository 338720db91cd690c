"""Test `make clean` and `make mrproper`: they remove files that make can create again, and no other file."""

import fcntl
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.data.manifest import Manifest, Shard, Split
from gpt2.system.errors import UserError
from scripts.dev import clean

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
    """Every kind of file that the commands write, and one source."""
    write_corpus(root / f"data/embedded-{KEY}")
    for name in (
        "gpt2/model/transformer.py",
        "gpt2/__pycache__/model.pyc",
        ".pytest_cache/x",
        ".venv/lib/__pycache__/torch.pyc",
        f"data/.embedded-{KEY}.lock",
        f"data/.embedded-{KEY}.4711.tmp/train-000.bin",
        "data/hellaswag_val.jsonl",
        "results/night/runs/B0/run.json",
        "results/night/__pycache__/kept",
        "results/night/lock",
        "results/begun/lock",
        "results/begun/config",
        "results/compare-a-b/compare.html",
        "results/bench/speed.json",
        "results/memory/cpu.html",
        ".config",
        ".config.old",
        "defconfig",
    ):
        write(root / name)


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    write_everything(root)
    monkeypatch.chdir(root)
    return root


def configure(**symbols: str) -> None:
    Path(".config").write_text("".join(f'CONFIG_{name}="{value}"\n' for name, value in symbols.items()))


def test_clean_removes_caches_and_prepared_data_and_nothing_else() -> None:
    assert clean.main(["caches", "data"]) == 0
    gone = ("gpt2/__pycache__", ".pytest_cache", "data")
    assert not any(Path(name).exists() for name in gone)
    stays = (
        ".venv/lib/__pycache__/torch.pyc",
        "results/night/__pycache__/kept",
        ".config",
        "gpt2/model/transformer.py",
    )
    assert all(Path(name).exists() for name in stays)


def test_results_are_removed_only_by_name() -> None:
    clean.main([*MRPROPER])
    assert Path("results/night/runs/B0/run.json").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["gpt2", "results"]
    clean.main([*MRPROPER, "results"])
    assert not Path("results").exists()


def test_foreign_files_remain_in_the_data_folder() -> None:
    Path("data/my_texts.jsonl").write_text("mine")
    Path("data/notes-2024").mkdir()
    mine = [write(f"data/books-202611220830/{name}", "mine") for name in ("a.txt", "manifest.json")]
    clean.main(["data"])
    names = ["books-202611220830", "my_texts.jsonl", "notes-2024"]
    assert sorted(path.name for path in Path("data").iterdir()) == names
    assert [path.read_text() for path in mine] == ["mine"] * 2


def test_configured_items_remain() -> None:
    configure(HELLASWAG_FILE="data/hellaswag_val.jsonl")
    clean.main(["data"])
    assert [path.name for path in Path("data").iterdir()] == ["hellaswag_val.jsonl"]


def test_a_text_in_a_prepared_corpus_stays() -> None:
    write(f"data/embedded-{KEY}/mine.txt")
    clean.main(["data"])
    assert [path.name for path in Path("data").rglob("*")] == [f"embedded-{KEY}", "mine.txt"]


def test_a_configured_text_with_a_space_in_its_name_stays() -> None:
    Path(f"data/embedded-{KEY}").rename(f"data/my_texts-{KEY}")
    write(f"data/my_texts-{KEY}/my notes.txt")
    configure(DATASET_FILES=f"'data/my_texts-{KEY}/my notes.txt' 'data/my_texts-{KEY}/train*'")
    clean.main(["data"])
    assert sorted(path.name for path in Path(f"data/my_texts-{KEY}").iterdir()) == [
        "my notes.txt",
        "train-000.bin",
    ]


@pytest.mark.parametrize("name", ["..", ".", "../mine.txt", "mine", "a\nb.bin", ".bin"])
def test_a_manifest_that_names_another_file_than_a_shard_removes_nothing(name: str) -> None:
    write("data/mine.txt")
    write(f"data/embedded-{KEY}/mine/thesis.txt")
    manifest = Path(f"data/embedded-{KEY}/manifest.json")
    manifest.write_text(manifest.read_text().replace("train-000.bin", name.replace("\n", "\\n")))
    before = sorted(Path("data").glob(f"*-{KEY}/**/*"))
    clean.main(["data"])
    assert Path("data/mine.txt").exists()
    assert sorted(Path("data").glob(f"*-{KEY}/**/*")) == before


def test_a_fifo_as_lock_does_not_block() -> None:
    Path("results/begun/lock").unlink()
    os.mkfifo("results/begun/lock")
    clean.main(["caches", "data", "results"])
    assert not Path("results").exists()


@pytest.mark.parametrize("place", ["results", "results/data", ".", "gpt2"])
def test_results_and_sources_in_the_data_folder_are_not_removed(place: str) -> None:
    configure(DATA_DIR=place)
    clean.main(["data"])
    assert Path("results/night/runs/B0/run.json").exists()
    assert Path("gpt2/model/transformer.py").exists()


def test_a_results_folder_in_the_data_folder_remains() -> None:
    configure(RESULTS_DIR=f"data/embedded-{KEY}/results")
    Path(f"data/embedded-{KEY}/results").mkdir()
    clean.main(["data"])
    assert Path(f"data/embedded-{KEY}/results").exists()


def test_a_folder_outside_the_project_is_named_and_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_everything(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    configure(RESULTS_DIR="../elsewhere/results", DATA_DIR=str(tmp_path / "elsewhere/data"))
    clean.main(["data", "results"])
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert "results/night: it is outside this folder" in capsys.readouterr().out


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "__pycache__").mkdir(parents=True)
    write_everything(outside)
    before = sorted(outside.rglob("*"))
    for link in ("gpt2/link", f"data/embedded-{KEY}/link", "data/files-0123456789ab", "results/night/link"):
        Path(link).symlink_to(outside)
    Path("results/link").symlink_to(outside / "results/night")
    clean.main([*MRPROPER, "results"])
    assert sorted(outside.rglob("*")) == before
    assert not Path("results/night").exists()
    shutil.rmtree("results")
    shutil.rmtree("data")
    Path("results").symlink_to(outside / "results")
    Path("data").symlink_to(outside / "data")
    clean.main(["data", "results"])
    assert sorted(outside.rglob("*")) == before


def test_a_second_clean_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clean.main([*MRPROPER, "results"])
    assert clean.main([*MRPROPER, "results"]) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_name_removes_nothing() -> None:
    with pytest.raises(UserError, match="fix: use some of caches"):
        clean.main(["caches", "everything"])
    assert Path(".pytest_cache").exists()


def test_foreign_files_remain_in_the_results_folder_and_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = [write("results/paper/runs/photo.jpg"), write("results/memory/notes.txt"), write("results/a.txt")]
    clean.main(["results"])
    assert sorted(path for path in Path("results").rglob("*") if path.is_file()) == sorted(mine)
    assert capsys.readouterr().out.count("it is not a result of this project") == 3


@pytest.mark.parametrize("lock", ["results/night/lock", "elsewhere/x/lock", f"data/.embedded-{KEY}.lock"])
def test_nothing_is_removed_while_a_study_or_a_preparation_runs(lock: str, checkout: Path) -> None:
    configure(RESULTS_DIR="elsewhere")
    with write(lock, "4711\n").open() as file:
        before = sorted(checkout.rglob("*"))
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="nothing is removed; fix: wait for it or stop it"):
            clean.main([*MRPROPER, "results"])
        assert sorted(checkout.rglob("*")) == before
    clean.main([*MRPROPER, "results"])
    assert not Path(".config").exists()


@pytest.mark.parametrize("place", ["docs", ".", "docs/results", "gpt2", "tests"])
@pytest.mark.parametrize("with_git", [False, True])
def test_a_results_folder_among_the_sources_costs_none(place: str, with_git: bool) -> None:
    sources = [write("docs/results/a/runs/B0/run.json"), write("tests/lock"), write("tests/config")]
    if with_git:
        subprocess.run("git init -q && git add docs tests gpt2/model", shell=True, check=True)
    write(".config", f'CONFIG_RESULTS_DIR="{place}"')
    clean.main([*MRPROPER, "results"])
    assert all(path.exists() for path in [*sources, Path("gpt2/model/transformer.py")])


def test_tracked_files_remain_in_every_folder() -> None:
    tracked = [write("results/paper/runs/B0/run.json"), Path("defconfig"), write("gpt2/__pycache__/a.txt")]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "-f", *map(str, tracked)], check=True)
    clean.main([*MRPROPER, "results"])
    assert all(path.exists() for path in tracked)
    assert not Path("results/night").exists()


def test_make_mrproper_removes_results_only_with_results_yes(checkout: Path) -> None:
    command = [sys.executable, "-S", "-m", "scripts.dev.clean", *MRPROPER]
    for flags, left in (("", True), (" -- RESULTS=no", True), (" -- RESULTS=yes", False)):
        environment = os.environ | {"PYTHONPATH": str(Path(clean.__file__).parents[2]), "MAKEFLAGS": flags}
        subprocess.run(command, env=environment, check=True)
        assert Path("results").exists() == left


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
DANGEROUS = (
    f"data/.embedded-{KEY}.1.tmp",
    "results/night",
    "results/begun/runs/B0",
    "gpt2/__pycache__",
    ".venv/lib",
)
NAMES = ("a.txt", "notes.md", "train-007.bin", "hellaswag_train.jsonl", "it's a $text.jsonl")


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_files_of_the_user_remain_in_every_folder(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    """Whatever the configuration; in a folder that a command writes, where CONFIG_DATASET_FILES names it."""
    root = tmp_path_factory.mktemp("random")
    write_everything(root)
    named = [Path(rng.choice(DANGEROUS), rng.choice(NAMES[:-1])) for _ in range(2)]
    mine = [write(root / rng.choice(PLACES) / rng.choice(NAMES), "mine") for _ in range(5)]
    mine += [write(root / path, "mine") for path in named]
    patterns = [rng.choice([str(path), str(root / path), f"{path.parent}/*"]) for path in named]
    lines = [f'CONFIG_DATASET_FILES="{" ".join(patterns)}"']
    if rng.random() < 0.5:
        lines += [f'CONFIG_{name}_DIR="{rng.choice([*PLACES[1:], "."])}"' for name in ("DATA", "RESULTS")]
    write(
        rng.choice([root / ".config", root / ".config.old", root / "results/night/config"]), "\n".join(lines)
    )
    before = Path.cwd()
    os.chdir(root)
    try:
        clean.main([*MRPROPER, "results"])
    finally:
        os.chdir(before)
    assert [path.read_text() for path in mine] == ["mine"] * 7
