from pathlib import Path

import pytest
import torch

from runtime import checkpoint
from runtime.checkpoint import CheckpointError


def state(value: float) -> dict[str, object]:
    return {"model": {"w": torch.full((3, 4), value)}, "optimizer": {"step": 7, "lr": value}}


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        checkpoint.save(root, iteration, state(float(iteration)), {"cut": False, "losses": [[1, 2.0, 3.0]]})


def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    save(tmp_path, 5)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.iteration == 5
    assert torch.equal(loaded.state["model"]["w"], torch.full((3, 4), 5.0))
    assert loaded.state["optimizer"] == {"step": 7, "lr": 5.0}
    assert loaded.meta["losses"] == [[1, 2.0, 3.0]]
    assert loaded.skipped == []


def test_overwriting_an_iteration_leaves_a_complete_checkpoint_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)
    observed = []
    rename = Path.rename

    def look_then_rename(self: Path, target: Path) -> Path:
        loaded = checkpoint.load_latest(tmp_path)
        observed.append(loaded is not None and loaded.iteration == 4)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look_then_rename)
    save(tmp_path, 4)
    assert observed
    assert all(observed)


@pytest.mark.parametrize("name", ["state.pt", "meta.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_loaded(
    tmp_path: Path, name: str, damage: str
) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    else:
        file.unlink()
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.iteration == 1
    assert "00000002" in loaded.skipped[0]


def test_without_a_complete_checkpoint_loading_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "00000001" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        checkpoint.load_latest(tmp_path)


def test_a_failed_save_leaves_the_previous_checkpoint_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def disk_full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full)
        with pytest.raises(CheckpointError, match="no free disk space"):
            save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.iteration == 1


def test_files_of_a_killed_process_are_removed_and_never_loaded(tmp_path: Path) -> None:
    (tmp_path / ".00000009.123.tmp").mkdir(parents=True)
    (tmp_path / ".00000009.123.tmp" / "state.pt").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path) is None
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_files_and_folders_of_the_user_stay_beside_and_in_checkpoints(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    save(elsewhere, 1)
    root.mkdir()
    (root / "00000001").symlink_to(elsewhere / "00000001")
    mine = [root / name / "notes.txt" for name in ("00000002", "20261122", "analysis", ".mine.tmp")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    save(root, 2, 3, 4)
    assert [path.read_text() for path in mine] == ["mine"] * 4
    assert checkpoint.verify(elsewhere / "00000001")
    assert [path.name for path in checkpoint.complete(root)] == ["00000003", "00000004"]


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("owned"),))  # type: ignore[return-value]


def test_a_checkpoint_that_carries_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "c", 1, {"model": Malicious()}, {})
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "c" / "00000001")
    assert not (tmp_path / "owned").exists()
