"""Commands: their exit status, Ctrl-C, and output whose reader ends early."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from referee.errors import NumericsError
from runtime.errors import UserError, run_command

COMMAND = """
import sys
from pathlib import Path
from runtime.errors import run_command

def main():
    print("first", flush=True)
    sys.stdin.read()  # until the reader of the output has ended
    for number in range({lines}):
        print(number)
    Path("end").write_text("reached")
    return {status}

run_command(main)
"""


@pytest.mark.parametrize("lines", [1, 100_000])  # written at the exit; written while the command runs
@pytest.mark.parametrize("status", [0, 3])
def test_a_command_continues_without_a_traceback_when_the_reader_of_its_output_ends(
    lines: int, status: int, tmp_path: Path
) -> None:
    code = COMMAND.format(lines=lines, status=status)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == status
    assert (tmp_path / "end").read_text() == "reached"


def test_ctrl_c_is_one_line_and_the_status_of_a_shell(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(lines=1, status=0)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "stopped\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("action", "name", "reason"),
    [
        ("Path('folder').read_text()", "folder", "Is a directory"),
        ("write_text(Path('folder'), 'x')", "folder", "Is a directory"),
    ],
)
def test_a_file_that_the_system_refuses_is_named_in_one_line(
    action: str, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    code = (
        "from pathlib import Path\n"
        "from runtime.errors import run_command\n"
        "from runtime.files import write_text\n"
        f"run_command(lambda: {action})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {name} cannot be used: {reason}; fix: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", [UserError, NumericsError])
def test_an_error_for_the_user_is_one_line_and_status_1(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise kind("the file is missing; fix: name another one")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: the file is missing; fix: name another one\n"
