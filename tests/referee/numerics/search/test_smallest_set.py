"""The smallest set by few questions, and a journal that survives a kill."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from referee.numerics.search.bisect_replays import Journal, smallest_set


class Asked:
    """A predicate that remembers its answers, as a journal does."""

    def __init__(self, holds: Any) -> None:
        self.holds, self.answers = holds, {}

    def __call__(self, value: Any) -> bool:
        key = json.dumps(value)
        if key not in self.answers:
            self.answers[key] = bool(self.holds(value))
        found: bool = self.answers[key]
        return found


@pytest.mark.parametrize("count", [1, 2, 7, 48, 300])
def test_one_culprit_takes_log2_of_the_items(count: int) -> None:
    for culprit in range(0, count, max(1, count // 9)):
        asked = Asked(lambda chosen, culprit=culprit: culprit in chosen)
        assert smallest_set(range(count), asked) == (culprit,)
        assert len(asked.answers) <= math.ceil(math.log2(count)) + 3


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_the_set_holds_and_no_item_of_it_can_be_left_out(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=3))
    asked = Asked(lambda chosen: any(one <= set(chosen) for one in culprits))  # any of these sets suffices
    found = smallest_set(range(count), asked)
    assert found is not None
    assert set(found) in culprits
    assert found == tuple(sorted(found))


@given(st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_predicate_without_order_gives_a_set_that_holds(count: int, random: Any) -> None:
    table = {mask: random.random() < 0.5 for mask in range(2**count)} | {2**count - 1: True, 0: False}
    asked = Asked(lambda chosen: table[sum(1 << item for item in chosen)])
    found = smallest_set(range(count), asked)
    assert found
    assert asked(found)
    assert not any(asked(tuple(item for item in found if item != one)) for one in found)


KILLED = """
import os, signal, sys
from pathlib import Path
from referee.numerics.search.bisect_replays import Journal, smallest_set
journal = Journal(Path(sys.argv[1]), {"of": sys.argv[2]})
def holds(chosen):
    def compute():
        if journal.asked == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return 17 in chosen
    return journal.ask(",".join(map(str, chosen)), compute)
print(smallest_set(range(40), holds), journal.asked, journal.reused)
"""


def search(path: Path, of: str = "a", kill_after: int = -1) -> tuple[int, str]:
    arguments = [sys.executable, "-c", KILLED, str(path), of, str(kill_after)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_killed_search_continues_with_its_answers(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert search(folder, kill_after=4) == (-9, "")
    (path,) = folder.iterdir()
    with path.open("a") as file:
        file.write('{"question": "0,1", "ans')  # as of a full disk
    first = search(folder)[1].split()
    assert first[0] == "(17,)"
    assert int(first[2]) >= 4
    assert search(folder)[1].split()[:2] == ["(17,)", "0"]
    assert Journal(folder, {"of": "a"}).ask("17", pytest.fail) is True
    assert not Journal(folder, {"of": "another"}).answers
