"""Prevent that a commit which changes one bit of one run passes as one with the same numbers."""

import pytest

from scripts.dev import same_numbers

LINES = [
    "arms/B0\ttrain loss\t1\t0x1.8000000000000p+2",
    "arms/B0\tcheckpoint head.weight\t00000024\t3f",
    "ranks/B0\ttrain loss\t1\t0x1.8000000000000p+2",
    "ranks/B0\ttrain loss\t2\t0x1.7000000000000p+2",
]


def text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_equal_files_pass() -> None:
    assert same_numbers.compare(text(LINES), text(LINES)) == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            [*LINES[:2], LINES[2].replace("8000000000000", "8000000000001"), LINES[3]],
            "step 1",
        ),  # the last bit
        (LINES[:3], "step 2"),  # a step is missing
        ([*LINES, LINES[3]], "step 2"),  # a resumed run logged a step twice
    ],
)
def test_one_other_value_fails_and_its_run_is_named(
    changed: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for sides in ((LINES, changed), (changed, LINES)):
        assert same_numbers.compare(*map(text, sides)) == 1
        first, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("ranks/B0: ")
        assert named in first


def test_another_order_of_lines_fails() -> None:
    assert same_numbers.compare(text(LINES), text([LINES[1], LINES[0], *LINES[2:]])) == 1
