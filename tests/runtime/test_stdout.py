"""What commands print: nothing that a terminal interprets, in any encoding; every command prints so."""

import ast
import io
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.output import LastingOutput, printable

ROOT = Path(__file__).parents[2]
PRODUCT = [
    path
    for top in (
        "gpt2",
        "ra",
        "grpo",
        "runtime",
        "study",
        "bench",
        "referee/pages",
        "scripts",
    )
    for path in (ROOT / top).rglob("*.py")
]
BIDI = {"RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"}


@given(st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_no_control_character_passes_and_printable_text_is_unchanged(text: str) -> None:
    shown = printable(text)
    for sign in shown:
        assert unicodedata.category(sign) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(sign) not in BIDI
    shown.encode()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text
    assert printable(text, keep=text) == text


@given(st.text())
def test_a_stream_of_any_encoding_takes_any_text(text: str) -> None:
    for encoding in ("ascii", "latin-1", "utf-8", "cp437"):
        content = io.BytesIO()
        out = LastingOutput(io.TextIOWrapper(content, encoding=encoding, newline=""))
        print(text, file=out)
        out.flush()
        assert content.getvalue().decode(encoding).count("\n") == text.count("\n") + 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_command_prints_the_name_of_any_file_on_any_terminal(tmp_path: Path, encoding: str) -> None:
    name = b"\x1b]0;x\x07 \xff\xc2\x9b\xc2\xb1"
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"scripts.report", name],
        cwd=ROOT,
        capture_output=True,
        env={"PYTHONIOENCODING": encoding, "LC_ALL": "C.UTF-8"},
    )
    sign = b"+-" if encoding == "ascii" else "±".encode()
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: \\x1b]0;x\\x07 \\udcff\\x9b" + sign + b" is not a study folder")


# Processes whose output another process reads.
NOT_ON_A_TERMINAL = {
    "scripts/train.py",
    "bench/disturbed_train.py",
    "study/trackers.py",
    "runtime/torch_devices.py",
    "ra/admission/child.py",
}


def test_every_command_prints_through_run_command() -> None:
    started = {path for path in PRODUCT if '__name__ == "__main__"' in path.read_text()}
    assert len(started) > 10
    for path in started:
        last = ast.parse(path.read_text()).body[-1]
        assert (
            "run_command(" in ast.unparse(last) or path.relative_to(ROOT).as_posix() in NOT_ON_A_TERMINAL
        ), path


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_command_needs_no_standard_stream(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m scripts.report missing {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_a_full_standard_output_is_named() -> None:
    program = "from runtime.errors import run_command; run_command(lambda: print('a line'))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(
        "error: <stdout> cannot be written: No space left on device; fix: "
    )
    assert done.stderr.count(b"\n") == 1
