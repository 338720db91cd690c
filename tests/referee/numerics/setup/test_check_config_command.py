"""The commands of the checklist: pack, compare, and make check-config."""

import os
import subprocess
import sys
from pathlib import Path

from tests.referee.numerics.setup.packed import pack

ROOT = Path(__file__).parents[4]


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
    assert (tmp_path / "check-config" / "check_config.json").exists()
