"""The commands of the checklist: pack, compare, and make check-config."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from referee.__main__ import main
from referee.numerics.setup.checklist_rows import FATAL
from tests.referee.numerics.setup.packed import pack

ROOT = Path(__file__).parents[4]


def test_the_commands_pack_compare_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("train --lr 1\n")
    a, b, out = (str(tmp_path / name) for name in ("a.zip", "b.zip", "out"))
    assert main(["check-config", "pack", str(tmp_path / "run.sh"), "-o", a]) == 0
    (tmp_path / "run.sh").write_text("train --lr 2 --x '<script>alert(1)</script>\x1b[2J'\n")
    assert main(["check-config", "pack", str(tmp_path / "run.sh"), "-o", b]) == 0
    assert main(["check-config", "compare", a, b, "-o", out]) == 0
    assert main(["check-config", "compare", a]) == 1
    assert "\x1b" not in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "check_config.json").read_text())
    row = content["rows"][0]
    assert [row[name] for name in ("entry", "grade", "a", "b")] == ["learning_rate", FATAL, "1", "2"]
    page = (tmp_path / "out" / "check_config.html").read_text()
    assert "learning_rate" in page
    assert "<script>alert(1)" not in page


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    pack(tmp_path / "a.zip")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from referee.__main__ import main; sys.exit(main(['check-config', 'compare', 'a.zip', 'a.zip']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    assert (tmp_path / "check-config" / "check_config.html").exists()


def test_make_compares_two_zips(tmp_path: Path) -> None:
    pack(tmp_path / "a.zip")
    make = ["make", "--no-print-directory", "-C", str(ROOT), "check-config", f"PYTHON={sys.executable}"]
    zips = [f"A={tmp_path / 'a.zip'}", f"B={tmp_path / 'a.zip'}", f"OUT={tmp_path / 'out'}"]
    done = subprocess.run([*make, *zips], capture_output=True, text=True, check=True)
    assert "Checklist: equal" in done.stdout
    assert (tmp_path / "out" / "check_config.json").exists()
