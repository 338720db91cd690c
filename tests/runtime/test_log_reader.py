"""The reader that follows the metrics.jsonl of a run, and the fence of its writers."""

import subprocess
import sys
from pathlib import Path

from runtime import files
from runtime.attempt import EXIT_SUPERSEDED, Fence, read_attempt
from runtime.metrics_log import LogReader, MetricsLine


def test_complete_lines_are_read_once_and_a_replaced_file_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = LogReader(path)
    assert reader.lines() == []
    path.write_text('{"event": "a"}\n{"event": "b')
    assert reader.lines() == [MetricsLine("a")]
    with path.open("a") as file:
        file.write('"}\nnot a line\n{"event": "c"}\n')
    assert [line.event for line in reader.lines()] == ["b", "c"]
    files.write_text(path, '{"event": "d"}\n' * 20)  # a resumed run replaces the file, here by a longer one
    assert [line.event for line in reader.lines()] == ["d"] * 20
    assert LogReader(path, at_end=True).lines() == []
    assert len(LogReader(path).read(most=40)) == 2  # the third from the end is cut


def test_a_worker_that_was_believed_dead_writes_nothing_more(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.attempt import Fence; "
        "fence = Fence(Path(sys.argv[1])); fence.check(); input(); fence.check(); print('wrote')"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (found := read_attempt(tmp_path)):
        assert worker.poll() is None
    assert found.process == worker.pid
    newer = Fence(tmp_path)
    output, errors = worker.communicate("\n")
    assert (worker.returncode, output) == (EXIT_SUPERSEDED, "")
    assert "was taken over by process" in errors
    newer.check()
