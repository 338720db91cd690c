"""The example of docs/bisect.md names the module that the page names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from referee.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs/bisect.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_take_its_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("overflow.py").write_text(source)
    commands = re.findall(r"^    python -m referee (.*)$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["bisect", "fix", "record", "repeat"]
    (answer,) = re.findall(r"^    the symptom is gone .*$", PAGE, re.MULTILINE)
    for command in commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr()
        printed = capsys.readouterr().out
        assert answer.strip() in printed or not command.startswith("bisect")
