"""The answer of a response: the documented forms, forms of published answers, and what is no number."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.gsm8k import written_answer as answer

DOCS = (Path(__file__).parents[2] / "docs/grpo.md").read_text(encoding="utf-8")
TABLE = DOCS.partition("## How an answer is read")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(.+?)` \| (none|[-\d]+) \|", TABLE, re.MULTILINE)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        *ROWS,
        ("", "none"),
        ("no number", "none"),
        ("####", "none"),
        ("####\n18", "18"),
        ("50 m2", "50"),
        (".5", ".5"),
    ],
)
def test_every_documented_form_is_read_as_documented(response: str, expected: str) -> None:
    assert answer(response) == (None if expected == "none" else Decimal(expected))


def grouped(number: str, sign: str) -> str:
    whole, point, rest = number.lstrip("-").partition(".")
    return "-" * number.startswith("-") + f"{int(whole):,}".replace(",", sign) + point + rest


FORMS: list[Callable[[str], str]] = [
    *(lambda number, sign=sign: f"#### {grouped(number, sign)}" for sign in (",", "{,}", r"\,", "，")),  # type: ignore[misc]
    lambda number: f"#### {number}",
    lambda number: f"#### {number.replace('-', '−')}",
    lambda number: f"#### ${grouped(number, ',')}",
    lambda number: rf"#### \${grouped(number, ',')}.",
    lambda number: f"#### ${grouped(number, '{,}')}$",
    lambda number: rf"The answer is $\boxed{{{grouped(number, '{,}')}}}$.",
    lambda number: rf"\[ \boxed{{\text{{{grouped(number, ',')} dollars}}}} \]",
    lambda number: f"Hence she has **{grouped(number, ',')}** apples left.",
    lambda number: f"#### {number}{'0' if '.' in number else '.00'}",
    lambda number: f"5 + 6 = 11, so it is {number} in total.",
]
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")  # of the task gsm8k of lm-evaluation-harness 0.4.13
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


@pytest.mark.parametrize(
    "response", ["#### -3", "so 12 #### 1,200", "it is 18 or -17", "18, of $1,250", "a 2.5 b"]
)
def test_the_answer_is_that_of_the_harness(response: str) -> None:
    strict, last = STRICT.findall(response), [wide or number for wide, number in FLEXIBLE.findall(response)]
    assert answer(response) == Decimal(re.sub("[,$]", "", (strict or last)[-1]))


@pytest.mark.parametrize(
    "number", ["0", "7", "18", "-3", "100", "18000", "-2500", "1234567", "12.5", "1000.25"]
)
def test_a_number_comes_back_in_every_written_form(number: str) -> None:
    assert [form(number) for form in FORMS if answer(form(number)) != Decimal(number)] == []


@given(st.text(st.sampled_from("0123456789 ,.'-+*/^=#$%{}()[]\\xab\n½²①٣−\u2009\ud800"), max_size=60))
def test_any_response_has_an_answer_or_none(text: str) -> None:
    answer(text)
    assert answer(f"{text}\n#### 7") == 7
