"""A fake of wandb that writes each call to a file; FAKE_WANDB=refuse makes the first of them fail."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

WANDB = """
import json, os
def _write(*call):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
def init(**options):
    if os.environ.get("FAKE_WANDB") == "refuse": raise ConnectionError("401: no such key")
    _write("init", options)
def log(values, step): _write("log", values, step)
class run:
    class summary:
        update = staticmethod(lambda values: _write("summary", values))
def finish(exit_code=0): _write("finish", exit_code)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake before the real package, in this process and its children."""
    folder.mkdir(parents=True)
    (folder / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FAKE_CALLS", f"{folder}/calls")


def observed() -> list[list[Any]]:
    """Return the calls of the fake."""
    path = Path(os.environ["FAKE_CALLS"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
