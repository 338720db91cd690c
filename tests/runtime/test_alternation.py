"""Test the settings of the learned attentions in .config."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.dotconfig import ConfigError, Symbols, parse_lines
from runtime.settings import AlternationSettings


def settings(init: str = "0.5", multiplier: str = "100", mix: str = "OUTPUT") -> AlternationSettings:
    text = (
        f'CONFIG_ALTERNATION_MIX_{mix}=y\nCONFIG_ALTERNATION_INIT="{init}"\n'
        f'CONFIG_ALTERNATION_LR_MULTIPLIER="{multiplier}"\n'
        "# CONFIG_ALTERNATION_RECOMPUTE is not set\n"
        + ("CONFIG_ALTERNATION_GATE_EVERY=8\n" if mix == "HARD" else "")
    )
    return AlternationSettings.from_symbols(Symbols("c", parse_lines(text, "c")))


def test_each_mix_is_read_by_its_name():
    assert [settings(mix=mix).mix for mix in ("OUTPUT", "SCORE", "HARD")] == ["output", "score", "hard"]
    assert settings() == AlternationSettings("output", 0.5, 100.0)
    assert settings(mix="HARD").gate_every == 8


@given(st.floats(-2, 3))
def test_the_initial_probability_lies_strictly_between_0_and_1(value):
    if 0 < value < 1:
        assert settings(init=repr(value)).initial_probability == value
    else:
        with pytest.raises(ConfigError, match=r"^c:2: CONFIG_ALTERNATION_INIT=.* in \(0, 1\)"):
            settings(init=repr(value))


@pytest.mark.parametrize("value", ["0", "-1", "100001", "fast", ""])
def test_the_multiplier_is_above_0(value):
    with pytest.raises(
        ConfigError, match=rf'^c:3: CONFIG_ALTERNATION_LR_MULTIPLIER="{value}" .* in \(0, 100000\]'
    ):
        settings(multiplier=value)
