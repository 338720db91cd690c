"""`make admit` examines a variant from beginning to end, and refuses what it cannot find."""

from pathlib import Path

import pytest

from ra import arms
from runtime.errors import UserError
from scripts import admit as command
from study import kconfig_commands as commands
from tests.checkout import link_project

NO_MASK = """
from gpt2.transformer import CausalSelfAttention
from torch.nn.functional import scaled_dot_product_attention


class NoMask(CausalSelfAttention):
    def attend(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)


def attention(layer, spec):
    return NoMask(spec.width, spec.heads, spec.dropout)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the smoke study's configuration and an empty folder of custom variants."""
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    commands.main(["defconfig", "gpt2-ra-ablation-smoke"])
    (tmp_path / "custom").mkdir()
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path / "custom")
    return tmp_path


def admit(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    monkeypatch.setattr("sys.argv", ["scripts.admit"])
    monkeypatch.setenv("MAKEFLAGS", f" -- VARIANT={name}")
    return command.main()


def test_a_leak_is_refused_with_its_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "custom" / "nomask.py").write_text(NO_MASK)
    assert admit(monkeypatch, "NOMASK") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "Refused: NOMASK fails causal" in text
    assert "nomask.py:7" in text
    assert "FLOPs per training token" in text


def test_an_unknown_variant_and_a_misnamed_file_are_errors(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="NOSUCH is not a variant"):
        admit(monkeypatch, "NOSUCH")
    with pytest.raises(UserError, match="VARIANT=NAME"):
        admit(monkeypatch, "")
    arms, grammar = capsys.readouterr().out.splitlines()
    assert {"B", "RALEARN", "VALUERES"} <= set(arms.split())
    assert "+POSITION=rotary" in grammar
    (place / "custom" / "raall.py").write_text(NO_MASK)
    with pytest.raises(UserError, match="built-in variant RAALL"):
        admit(monkeypatch, "RAALL")
