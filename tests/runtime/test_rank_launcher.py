"""The launcher of ranks ends as the rank that failed first, passes signals on, and ends ranks that hang."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from runtime import ranks
from runtime.ranks import launch
from runtime.signals import Stop

LOST = f"import time; time.sleep(0.3); sys.exit({ranks.EXIT_RANK_LOST})"
HEAD = "import os, signal, sys; rank = os.environ['RANK']\n"


def ended(code: str, stop: Stop | None = None, count: int = 2) -> int:
    return launch(count, [sys.executable, "-c", HEAD + code], stop or Stop())


def test_every_rank_has_torchruns_variables(tmp_path: Path) -> None:
    names = (*ranks.VARIABLES, "LOCAL_WORLD_SIZE")
    code = f"open(f'{tmp_path}/' + rank, 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert ended(code, count=3) == 0
    found = [(tmp_path / f"{number}").read_text().split() for number in range(3)]
    assert [words[:4] for words in found] == [[f"{r}", f"{r}", "3", "127.0.0.1"] for r in range(3)]
    assert len({tuple(words[4:]) for words in found}) == 1
    assert found[0][5] == "3"


def test_ranks_divide_the_compile_threads_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of 8 ranks starts as many compilers as the machine has CPUs."""
    monkeypatch.delenv(ranks.COMPILE_THREADS, raising=False)
    monkeypatch.setattr(ranks, "allowed_cpus", lambda: set(range(12)))
    code = f"open(f'{tmp_path}/' + rank, 'w').write(os.environ['{ranks.COMPILE_THREADS}'])"
    assert ended(code, count=3) == 0
    assert {(tmp_path / f"{number}").read_text() for number in range(3)} == {"4"}
    monkeypatch.setenv(ranks.COMPILE_THREADS, "7")
    assert ended(code, count=1) == 0
    assert (tmp_path / "0").read_text() == "7"


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("sys.exit(0)", 0, ""),
        (f"sys.exit(4) if rank == '1' else None\n{LOST}", 4, ""),
        (f"sys.exit('error: no data') if rank == '1' else None\n{LOST}", 1, "error: no data"),
        (
            f"os.kill(os.getpid(), 9) if rank == '1' else None\n{LOST}",
            -9,
            "error: rank 1 was ended by SIGKILL",
        ),
        (f"print('error: lost', file=sys.stderr)\n{LOST}", ranks.EXIT_RANK_LOST, "error: lost"),
    ],
    ids=["all well", "out of memory", "error", "killed", "all lost"],
)
def test_the_launcher_ends_as_the_rank_that_ended_the_run(
    capfd: pytest.CaptureFixture[str], code: str, status: int, last: str
) -> None:
    assert ended(code) == status
    lines = capfd.readouterr().err.splitlines()
    assert (lines[-1] if lines else "") == last


def test_a_rank_that_hangs_after_another_failed_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    hang = "import time\nif rank == '0': time.sleep(600)\n"
    assert ended(f"{hang}sys.exit({ranks.EXIT_RANK_LOST})") == ranks.EXIT_RANK_LOST


def test_a_request_to_stop_reaches_every_rank() -> None:
    stop = Stop()
    code = (
        "import time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        f"os.kill({os.getpid()}, signal.SIGUSR1) if rank == '1' else None\ntime.sleep(600)"
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: threading.Timer(1.0, request).start())

    def request() -> None:
        stop.requested = "SIGTERM"

    try:
        assert ended(code, stop) == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_the_first_rank_has_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended("print('event of', rank)") == 0
    found = capfd.readouterr()
    assert (found.out, found.err) == ("event of 0\n", "event of 1\n")
