"""Test the names of platforms."""

from __future__ import annotations

import pytest

from gpt2.platforms import (
    FORMATS,
    KINDS,
    WEIGHTS,
    Platform,
    PlatformError,
    parse_platform,
)


def test_every_kind_of_platform_is_parsed() -> None:
    for name in FORMATS:
        assert parse_platform(name).bits is None
    found = {name: (parse_platform(name).bits, parse_platform(name).group) for name in WEIGHTS}
    assert found == {"int8": (8, 0), "int4": (4, 32), "int3": (3, 32), "int2": (2, 32)}
    assert parse_platform("int4:64").group == 64
    assert parse_platform("int4:row") == Platform("int4:row", bits=4, group=0)
    assert parse_platform("dynamic-int8").dynamic
    assert (parse_platform("foreign:1e-3").kind, parse_platform("foreign:1e-3").strength) == ("error", 1e-3)
    for kind in KINDS:
        assert parse_platform(f"foreign.{kind}:0").kind == kind
    names = ("fp32", "bf16", "int8", "int4:64", "dynamic-int8", "foreign:1e-3", "foreign.exp:0.1")
    assert len({parse_platform(name).text for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", r"there is no platform \(empty\); fix: use fp32, bf16"),
        ("fp8", "there is no platform fp8"),
        ("int4:", r"int4:: \(empty\) is not a group size; fix: use int4:32"),
        ("foreign", r"\(empty\) is not a number in \[0, 1\]"),
        ("foreign:2", r"2 is not a number in \[0, 1\]"),
        ("foreign.gelu:1e-3", "there is no kind gelu"),
        ("bf16@", r"MACHINE=\(empty\) is not a machine name; fix: .*MACHINE=w7900"),
        ("bf16@a/b", "MACHINE=a/b is not a machine name"),
        (f"foreign:0.{'0' * 300}1", "has 311 characters, more than 64; fix: a shorter number"),
    ],
)
def test_an_unknown_platform_is_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(PlatformError, match=says) as caught:
        parse_platform(name)
    assert "\n" not in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_platform_of_another_machine_has_its_arithmetic_and_a_label_of_its_own() -> None:
    found = parse_platform("int4:64@npu-910.b")
    assert (found.name, found.machine, found.label) == ("int4:64", "npu-910.b", "int4:64@npu-910.b")
    assert found.text == "int4 weights, groups of 64 inputs, on npu-910.b"
    assert parse_platform("int4:64").label == "int4:64"
