"""Fakes of wandb and trackio that write each call to a file; FAKE_WANDB=refuse or die makes the first of them fail."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

WRITE = """
import json, os
def _write(*call):
    with open(os.environ["FAKE_CALLS"] + os.path.basename(_name), "a") as file:
        file.write(json.dumps(call) + "\\n")
"""
WANDB = (
    WRITE
    + """
import pathlib, types
_name = "wandb"
_lines = [0]
_mode = os.environ.get("FAKE_WANDB", "")
def setup():
    return types.SimpleNamespace(settings=types.SimpleNamespace(base_url=os.environ["FAKE_WANDB_URL"]))
def init(**options):
    if _mode == "refuse": raise ConnectionError("401: no such key")
    _write("init", options)
    if options["mode"] == "offline":
        pathlib.Path(options["dir"], "wandb", "offline-run-20260101_000000-" + options["id"]).mkdir(parents=True)
def log(values, step):
    _lines[0] += 1
    if _mode == "die" and _lines[0] == 2: os._exit(9)
    _write("log", values, step)
class run:
    class summary:
        update = staticmethod(lambda values: _write("summary", values))
def finish(exit_code=0): _write("finish", exit_code)
"""
)
SYNC = """
import sys, wandb
if wandb._mode == "refuse":
    print("Error: 401: no such key"); sys.exit(1)
wandb._write(*sys.argv[1:])
"""
TRACKIO = (
    WRITE
    + """
import types
_name = "trackio"
def _runs(project):
    try: lines = open(os.environ["FAKE_CALLS"] + "trackio").read().splitlines()
    except FileNotFoundError: raise ValueError("Project does not exist")
    opened = [json.loads(line)[1] for line in lines if json.loads(line)[0] == "init"]
    return [types.SimpleNamespace(config=one["config"], delete=lambda i=one["config"]["run_id"]: _write("delete", i))
            for one in opened]
class Api:
    runs = staticmethod(_runs)
def init(**options): _write("init", options)
def log(values, step): _write("log", values, step)
def finish(): _write("finish")
"""
)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes before the real packages, in this process and its children. W&B's server answers."""
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(WANDB)
    (folder / "wandb" / "__main__.py").write_text(SYNC)
    (folder / "trackio.py").write_text(TRACKIO)
    (folder / "answer").write_text("{}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FAKE_CALLS", f"{folder}/calls-")
    monkeypatch.setenv("FAKE_WANDB_URL", (folder / "answer").as_uri())


def observed(logger: str) -> list[list[Any]]:
    """Return the calls of a fake."""
    path = Path(os.environ["FAKE_CALLS"] + logger)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
