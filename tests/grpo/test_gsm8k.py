"""Reward and problems of GSM8K: published solutions earn it, and what is refused."""

import json
from pathlib import Path

import pytest

from grpo.gsm8k import Problem, UserError, digest, read_problems, reward
from tests.published import published


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [("#### 1,200.00", "1200", 1.0), ("18 or 17", "18", 0.0), ("17 or 18", "18", 1.0), ("eighteen", "18", 0.0),
     ("-3", "3", 0.0), ("-0", "0", 1.0), ("2.5", "2.5", 1.0), ("9" * 40, "9" * 39, 0.0)],
)  # fmt: skip
def test_numbers_are_compared_as_numbers(response: str, answer: str, right: float) -> None:
    assert reward(response, answer) == right


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_published_solution_earns_the_reward(split: str, count: int) -> None:
    path = published(f"gsm8k/{split}.jsonl")
    problems = read_problems(str(path), split)
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(problems) == len(solutions) == count
    answers = [text.rpartition("#### ")[2].replace(",", "") for text in solutions]
    assert [one.answer for one in problems] == answers
    assert all(reward(text, one.answer) for text, one in zip(solutions, problems, strict=True))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no problems"),
        ("{", ":1 is not JSON"),
        ('{"question": "a"}', ":1 has no question and answer"),
        ('{"question": "a", "answer": "5"}', ':1: the answer does not end with "#### number"'),
        ('{"question": "a", "answer": "#### 5"}\n{"question": "a", "answer": "#### five"}', ":2: the answer"),
    ],
)
def test_a_file_without_problems_is_one_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="fix: ") as raised:
        read_problems(str(path), "train")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_names_its_symbol(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; fix: CONFIG_GRPO_TEST_FILE="):
        read_problems(str(tmp_path / "none.jsonl"), "test")


def test_the_digest_depends_on_every_problem() -> None:
    one, other = Problem("a", "1"), Problem("a", "2")
    assert len({digest([one]), digest([other]), digest([one, other]), digest([])}) == 4
