"""Call the configurator in the tests' current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.dotconfig import ConfigError
from study import kconfig_commands as commands

BASES = sorted(path.name for path in commands.DEFCONFIGS.iterdir() if path.is_file())
FRAGMENTS = sorted(path.name for path in commands.fragments())
STUDY = "gpt2-ra-ablation"


def run(*arguments: str, makeflags: str = "") -> None:
    assert commands.main(arguments, {"MAKEFLAGS": makeflags}) == 0


def defconfig(*assignments: str, spec: str = STUDY) -> str:
    run("defconfig", spec, *assignments)
    return Path(".config").read_text()


def refusal(*arguments: str, makeflags: str = "") -> str:
    """Return the message of a command that fails and changes no file."""
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    with pytest.raises(ConfigError) as caught:
        run(*arguments, makeflags=makeflags)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def own_defconfigs(monkeypatch, folder: Path, **files: str) -> None:
    """Replace the defconfigs and fragments; `target__x` is target/x."""
    (folder / "target").mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("__", "/")).write_text(text)
    monkeypatch.setattr(commands, "DEFCONFIGS", folder)
