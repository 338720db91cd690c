"""The answer of a response: the documented forms, forms of published answers, and what is no number."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.gsm8k import written_answer as answer
from tests.published import published

DOCS = (Path(__file__).parents[2] / "docs/grpo.md").read_text(encoding="utf-8")
TABLE = DOCS.partition("## How an answer is read")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(.+?)` \| (none|[-\d/]+) \|", TABLE, re.MULTILINE)


def value(text: str) -> Fraction | None:
    return None if text == "none" else Fraction(text)


@pytest.mark.parametrize(("response", "expected"), ROWS)
def test_every_documented_form_is_read_as_documented(response: str, expected: str) -> None:
    assert answer(re.sub(r"⟨U\+(\w+)⟩", lambda code: chr(int(code[1], 16)), response)) == value(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("", "none"), ("no number", "none"), ("eighteen", "none"), ("####", "none"), ("#### Step 4\nso 18", "none"),
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"), ("####\n18", "18"), ("#### 18\n\n2 eggs", "18"),
        ("#### 2**10", "none"), ("#### 10²", "none"), ("2^{10}", "none"), ("#### 5 × 3", "none"), ("10-$5", "none"),
        ("between 5-10", "none"), ("#### 5–10", "none"), ("#### 3x + 2", "none"), ("#### 0x12", "none"),
        ("#### 18 ≈ 17.9", "none"), ("#### 18 ≤ 20", "none"), ("√16", "none"), ("答案是18。", "18"),
        ("#### 1,2,3", "none"), ("#### 1.200.000", "none"), ("#### 5 18", "none"),
        ("#### 1/2/3", "none"), ("#### 6(3)", "none"), ("#### 20 minus 7", "none"), ("#### 5! = 120", "none"),
        ("#### 10₂", "none"), (r"#### \sqrt{16}", "none"), (r"18 \times 2", "none"), ("#### x = 5", "none"),
        ("So he has 18 left (20 - 2).", "18"), ("3 + 4 = 7", "7"), (r"\frac{36}{2} = 18", "18"), ("x = - 5", "-5"),
        ("Answer - 5", "5"), ("- 5 apples", "5"), ("covid-19", "19"), ("The area is 50 m2", "50"), ("H2O, 18", "18"),
        (r"18^{\text{th}}", "18"), ("90°", "90"), ("60 km/h", "60"), ("18/day", "18"), ("#### 18 - that is all", "18"),
        ("#### 18-year", "18"), ("½", "1/2"), ("#### −½", "-1/2"), (r"#### 5\frac{1}{2} hours", "11/2"),
        (r"#### \frac{1{,}000}{2}", "500"), (r"#### 18\text{,}000", "18000"), (r"#### 18,\!000", "18000"),
        ("#### -0", "0"), ("#### .5", "1/2"), ("#### 𝟏𝟖", "18"), ("#### ٣", "3"), (r"\[ \boxed{18} \]", "18"),
    ],
)  # fmt: skip
def test_a_formula_is_no_number_and_a_remark_does_not_count(response: str, expected: str) -> None:
    assert answer(response) == value(expected)


def grouped(number: str, sign: str) -> str:
    whole, point, rest = number.lstrip("-").partition(".")
    return "-" * number.startswith("-") + f"{int(whole):,}".replace(",", sign) + point + rest


def in_digits(number: str, zero: str) -> str:
    return re.sub(r"\d", lambda digit: chr(ord(zero) + int(digit[0])), number)


SEPARATORS = (",", "{,}", r"\,", r"\;", r",\!", "~", "\u2009", "\u202f", "\u00a0", " ", "'", "’", "_", "，")
FORMS: list[Callable[[str], str]] = [
    *(lambda number, sign=sign: f"#### {grouped(number, sign)}" for sign in SEPARATORS),  # type: ignore[misc]
    lambda number: f"#### {number}",
    lambda number: f"#### {number.replace('-', '−')}",
    lambda number: f"#### ${grouped(number, ',')}",
    lambda number: rf"#### \${grouped(number, ',')}.",
    lambda number: f"#### ${grouped(number, '{,}')}$",
    lambda number: f"#### {grouped(number, ',')} €",
    lambda number: rf"The answer is $\boxed{{{grouped(number, '{,}')}}}$.",
    lambda number: rf"\[ \boxed{{\text{{{grouped(number, ',')} dollars}}}} \]",
    lambda number: rf"#### {number}\text{{ cm}}^2",
    lambda number: f"#### {number} m²",
    lambda number: rf"#### {number}\%",
    lambda number: f"＃＃＃＃ {in_digits(number, '０')}",
    lambda number: f"#### {in_digits(number, '٠')}",
    lambda number: f"Hence she has **{grouped(number, ',')}** apples left.",
    lambda number: f"#### {number}{'0' if '.' in number else '.00'}",
    lambda number: rf"#### \frac{{{number}}}{{1}}",
    lambda number: f"#### {number} / 1",
    lambda number: f"#### {number} (of 20)",
    lambda number: f"5 + 6 = 11, so it is {number} in total.",
]


@pytest.mark.parametrize(
    "number", ["0", "7", "18", "-3", "100", "18000", "-2500", "1234567", "12.5", "1000.25"]
)
def test_a_number_comes_back_in_every_written_form(number: str) -> None:
    assert [form(number) for form in FORMS if answer(form(number)) != Fraction(number)] == []


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_published_answer_comes_back_in_every_written_form(split: str) -> None:
    lines = published(f"gsm8k/{split}.jsonl").read_text(encoding="utf-8").split("\n")
    numbers = [json.loads(line)["answer"].rpartition("#### ")[2].replace(",", "") for line in lines if line]
    wrong = [form(number) for number in numbers for form in FORMS if answer(form(number)) != Fraction(number)]
    assert (len(FORMS), wrong) == (33, [])


@given(st.text(st.sampled_from("0123456789 ,.'-+*/^=#$%{}()[]\\xab\n½²①٣−\u2009\ud800"), max_size=60))
def test_any_response_has_an_answer_or_none(text: str) -> None:
    found = answer(text)
    assert found is None or found == found.limit_denominator(10**60)
    assert answer(f"{text}\n#### 7") == 7
