"""Test `make clean` and `make mrproper`: they remove files that make can create again, and no other file."""

from pathlib import Path

import pytest

from scripts.dev import clean

KEY = "0123456789ab"
MRPROPER = ("caches", "data", "config", "venv")


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with every kind of file."""
    root = tmp_path / "checkout"
    for name in (
        "gpt2/model/transformer.py",
        "gpt2/__pycache__/model.pyc",
        ".pytest_cache/x",
        ".venv/lib/__pycache__/torch.pyc",
        f"data/embedded-{KEY}/train-000.bin",
        f"data/.embedded-{KEY}.lock",
        f"data/.embedded-{KEY}.4711.tmp/train-000.bin",
        "data/hellaswag_val.jsonl",
        "results/night/runs/B0/run.json",
        "results/night/__pycache__/kept",
        ".config",
        ".config.old",
        "defconfig",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
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


def test_results_go_only_when_they_are_asked_for_by_name() -> None:
    clean.main([*MRPROPER])
    assert Path("results/night/runs/B0/run.json").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["gpt2", "results"]
    clean.main([*MRPROPER, "results"])
    assert not Path("results").exists()


def test_what_was_not_made_here_stays_in_the_data_folder() -> None:
    Path("data/my_texts.jsonl").write_text("mine")
    Path("data/notes-2024").mkdir()
    clean.main(["data"])
    assert sorted(path.name for path in Path("data").iterdir()) == ["my_texts.jsonl", "notes-2024"]


def test_items_that_the_configuration_names_stay() -> None:
    configure(HELLASWAG_FILE="data/hellaswag_val.jsonl")
    clean.main(["data"])
    assert [path.name for path in Path("data").iterdir()] == ["hellaswag_val.jsonl"]


@pytest.mark.parametrize("place", ["results", "results/data", ".", "gpt2"])
def test_a_data_folder_that_holds_results_or_sources_costs_neither(place: str) -> None:
    configure(DATA_DIR=place)
    clean.main(["data"])
    assert Path("results/night/runs/B0/run.json").exists()
    assert Path("gpt2/model/transformer.py").exists()


def test_a_results_folder_in_the_data_folder_stays() -> None:
    configure(RESULTS_DIR=f"data/embedded-{KEY}/results")
    Path(f"data/embedded-{KEY}/results").mkdir()
    clean.main(["data"])
    assert Path(f"data/embedded-{KEY}/results").exists()


def test_a_folder_elsewhere_is_left_alone_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("results", "data"):
        (tmp_path / "elsewhere" / name / f"embedded-{KEY}").mkdir(parents=True)
    configure(RESULTS_DIR="../elsewhere/results", DATA_DIR=str(tmp_path / "elsewhere/data"))
    clean.main(["data", "results"])
    assert (tmp_path / "elsewhere/results" / f"embedded-{KEY}").exists()
    assert (tmp_path / "elsewhere/data" / f"embedded-{KEY}").exists()
    assert capsys.readouterr().out.count("not removed") == 2


def test_no_link_is_followed_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "__pycache__").mkdir(parents=True)
    (outside / f"embedded-{KEY}").mkdir()
    Path("gpt2/link").symlink_to(outside)
    Path(f"data/embedded-{KEY}/link").symlink_to(outside)
    Path("results/link").symlink_to(outside)
    clean.main([*MRPROPER, "results"])
    assert (outside / "__pycache__").exists()
    assert not Path("data").exists()
    assert not Path("results").exists()
    Path("results").symlink_to(outside)
    Path("data").symlink_to(outside)
    clean.main(["data", "results"])
    assert sorted(path.name for path in outside.iterdir()) == ["__pycache__", f"embedded-{KEY}"]


def test_a_second_clean_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clean.main([*MRPROPER, "results"])
    assert clean.main([*MRPROPER, "results"]) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_name_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert clean.main(["caches", "everything"]) == 1
    assert "fix: use some of caches" in capsys.readouterr().err
    assert Path(".pytest_cache").exists()
