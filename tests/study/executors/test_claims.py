"""Claims: one holder at a time, takeover of dead holders, a fence for those that come back."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime import checkpoint
from study.executors import claims
from study.executors.child_process import EXIT_SUPERSEDED
from study.executors.claims import Claim, ClaimedError, ClaimObserver, claimed, is_locked, newest, read_holder

ROOT = Path(__file__).parents[3]


def other_machine(folder: Path, sleep: object = None) -> Claim:
    """A claim of another machine, whose observer does not wait."""
    return Claim(folder, machine="elsewhere", stale_seconds=5.0, sleep=sleep or (lambda seconds: None))  # type: ignore[arg-type]


def test_a_claim_is_marked_as_done_and_the_next_one_has_the_next_number(tmp_path: Path) -> None:
    for number in (1, 2):
        with claimed(tmp_path, "slot 3") as claim:
            assert claim.number == number
            assert is_locked(tmp_path)
        found, text = newest(tmp_path)
        holder = read_holder(text)
        assert holder
        assert (found, holder.done, holder.pid, holder.place) == (number, True, os.getpid(), "slot 3")
        assert not is_locked(tmp_path)
    assert [path.name for path in tmp_path.glob("claim.0*")] == ["claim.00000002"]


def test_a_living_holder_on_this_machine_is_respected_at_once(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(ClaimedError, match=f"process {os.getpid()} on "):
        Claim(tmp_path, sleep=lambda seconds: pytest.fail("it waits")).take()


def test_a_dead_holder_on_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    code = f"from study.executors.claims import Claim; from pathlib import Path; import os; c = Claim(Path({str(tmp_path)!r})); c.take(); os._exit(9)"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 9
    assert newest(tmp_path)[0] == 1
    claim = Claim(tmp_path, sleep=lambda seconds: pytest.fail("it waits"))
    claim.take()
    assert claim.number == 2


def test_a_holder_on_another_machine_is_dead_if_its_claim_does_not_change(tmp_path: Path) -> None:
    away = other_machine(tmp_path)
    away.take()
    assert away._lock
    away._lock.close()  # a lock of another machine may be invisible here
    waited: list[float] = []

    def beats(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            assert away.beat()

    with pytest.raises(ClaimedError, match="on "):
        Claim(tmp_path, stale_seconds=5.0, sleep=beats).take()
    assert len(waited) == 3
    waited.clear()
    here = Claim(tmp_path, stale_seconds=5.0, sleep=waited.append)
    here.take()
    assert (here.number, len(waited)) == (2, 5)
    assert not away.beat()
    assert not away.is_held()
    assert here.beat()


def test_a_holder_that_ends_while_it_is_watched_leaves_the_run(tmp_path: Path) -> None:
    away = other_machine(tmp_path)
    away.take()
    here = Claim(
        tmp_path, stale_seconds=5.0, sleep=lambda seconds: away.release() if away.is_held() else None
    )
    here.take()
    assert here.number == 2


def test_an_observer_reports_a_holder_that_does_not_change_by_its_clock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    away = other_machine(tmp_path)
    away.take()
    observer = ClaimObserver(tmp_path, lambda: now[0])
    for _ in range(3):
        now[0] += claims.STALE_SECONDS - 1
        assert observer.is_alive()
        assert away.beat()
        now[0] += claims.OBSERVE_SECONDS
        assert observer.is_alive()
    now[0] += claims.STALE_SECONDS - 1
    assert observer.is_alive()
    monkeypatch.setattr(claims, "newest", lambda folder: pytest.fail("it reads the claim"))
    now[0] += claims.OBSERVE_SECONDS - 1
    assert observer.is_alive()
    monkeypatch.undo()
    now[0] += 1
    assert not observer.is_alive()


def test_an_observer_reports_the_end_of_a_holder_at_once(tmp_path: Path) -> None:
    now = [0.0]
    with claimed(tmp_path) as claim:
        here = ClaimObserver(tmp_path, lambda: now[0])
        assert here.is_alive()
        now[0] += 10 * claims.STALE_SECONDS
        assert here.is_alive()  # its flock is held
        assert claim._lock
        claim._lock.close()  # as after SIGKILL
        now[0] += claims.OBSERVE_SECONDS
        assert not here.is_alive()
    away = other_machine(tmp_path)
    away.take()
    observer = ClaimObserver(tmp_path, lambda: now[0])
    away.release()
    assert not observer.is_alive()
    assert not ClaimObserver(tmp_path / "empty", lambda: 0.0).is_alive()


def test_of_many_takers_at_the_same_moment_one_succeeds(tmp_path: Path) -> None:
    """All have seen the dead claim before the first one takes it over."""
    dead = other_machine(tmp_path)
    dead.take()
    assert dead._lock
    dead._lock.close()
    barrier = threading.Barrier(16)
    won: list[int] = []

    def take(number: int) -> None:
        claim = Claim(
            tmp_path, machine=f"machine {number}", stale_seconds=1.0, sleep=lambda s: barrier.wait() and None
        )
        try:
            claim.take()
        except ClaimedError:
            return
        won.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


FENCED = """
import sys, torch
from pathlib import Path
from runtime import checkpoint
from study.executors.claims import Claim
folder = Path(sys.argv[1])
claim = Claim(folder)
claim.take()
def taken_over():  # between the first file and the rename
    claim.check()
    other = Claim(folder, machine="elsewhere", sleep=lambda seconds: None)
    claim._lock.close()
    other.take()
checkpoint.save(folder / "checkpoint", 5, {"x": torch.zeros(1)}, {}, fence=taken_over)
"""


def test_a_process_that_was_replaced_gives_no_checkpoint_a_name(tmp_path: Path) -> None:
    """The takeover falls into the save: its temporary folder is complete, and the rename does not occur."""
    done = subprocess.run(
        [sys.executable, "-c", FENCED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == EXIT_SUPERSEDED, done.stderr
    assert "was taken over by process" in done.stderr
    assert checkpoint.complete(tmp_path / "checkpoint") == []


def test_a_beat_changes_the_claim_while_its_process_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    with claimed(tmp_path):
        changed = threading.Event()
        while json.loads(newest(tmp_path)[1])["beats"] < 3:
            assert not changed.wait(0.01)
