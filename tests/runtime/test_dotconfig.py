"""Test the strict reader of .config: lines, strings and numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.dotconfig import ConfigError, Symbols, parse_lines, quote, read_symbols


def symbol(text: str) -> Symbols:
    return Symbols("c", parse_lines(f"CONFIG_X={quote(text)}", "c"))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_is_read_as_python_does(value):
    assert symbol(repr(value)).number("X", "(-inf, inf)") == value


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_a_config_error(text):
    try:
        value = symbol(text).number("X", "(-inf, inf)")
    except ConfigError:
        return
    assert math.isfinite(value)
    assert value == float(text)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
def test_a_quoted_string_is_read_unchanged(text):
    entry = parse_lines(f"CONFIG_X={quote(text)}", "c")["X"]
    assert (entry.value, entry.quoted) == (text, True)


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused_with_its_line(text):
    try:
        places = [entry.where for entry in parse_lines(text, "c").values()]
    except ConfigError as error:
        places = [str(error)]
    assert all(place.startswith("c:") for place in places)


@pytest.mark.parametrize(
    "line",
    [
        "X=1",
        "CONFIG_X",
        "CONFIG_X =1",
        " CONFIG_X=1",
        'CONFIG_X="a',
        'CONFIG_X="\\n"',
        "CONFIG_X=",
        "CONFIG_X=a b",
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_the_right_form(line):
    with pytest.raises(ConfigError, match=r"^some/file:3: .*fix: ") as caught:
        parse_lines(f"# comment\nCONFIG_A=y\n{line}\n", "some/file")
    assert line.strip() in str(caught.value)


def test_a_duplicate_names_both_lines():
    with pytest.raises(ConfigError, match=r"^c:3: CONFIG_A=n .*CONFIG_A=y at c:1"):
        parse_lines("CONFIG_A=y\n\n# CONFIG_A is not set\n", "c")


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; fix: make defconfig-"):
        read_symbols(tmp_path / ".config")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_symbols(tmp_path)
    (tmp_path / ".config").write_bytes(b"CONFIG_A=\xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text at byte 9; fix: "):
        read_symbols(tmp_path / ".config")
