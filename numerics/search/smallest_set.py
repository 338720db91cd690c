"""The smallest set of items for which a predicate holds, by few calls of it, and a journal of its answers.

A call is a replay of training steps, so the number of calls is what counts. One culprit among n items needs about
log2(n) + 2 of them, k culprits about k (log2(n) + 1) + 2 plus those of the last check. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Hashable)
Holds = Callable[[tuple[Item, ...]], bool]


def smallest_set(items: Sequence[Item], holds: Holds[Item]) -> tuple[Item, ...] | None:
    """Return a set for which `holds` is true and of which no single item can be left out; None if not for all items.

    Binary search finds the shortest prefix that holds; its last item is needed, and the search goes on within the
    prefix. ddmin then checks the result, which only a predicate that more items can falsify changes. The order of the
    items is kept. `holds` should remember its answers (Journal).
    """
    if holds(()):
        return ()
    if not holds(tuple(items)):
        return None
    needed: list[Item] = []
    rest = list(items)

    def chosen(count: int) -> tuple[Item, ...]:
        taken = {*needed, *rest[:count]}
        return tuple(item for item in items if item in taken)

    while not holds(chosen(0)):
        count = first_true(1, len(rest), lambda count: holds(chosen(count)))
        needed.append(rest[count - 1])
        rest = rest[: count - 1]
    return ddmin(chosen(0), holds)


def first_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number of low .. high for which `holds` is true. It is known to be true for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def ddmin(items: Sequence[Item], holds: Holds[Item]) -> tuple[Item, ...]:
    """Return a subset for which `holds` is true and of which no single item can be left out. It holds for `items`.

    Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28 (2002).
    """
    found, parts = tuple(items), 2
    while len(found) > 1:
        size = -(-len(found) // parts)
        subsets = [found[start : start + size] for start in range(0, len(found), size)]
        complements = [tuple(item for item in found if item not in subset) for subset in subsets]
        smaller = next((one for one in subsets if holds(one)), None)
        if smaller is not None:
            found, parts = smaller, 2
            continue
        smaller = next((one for one in complements if len(subsets) > 2 and holds(one)), None)
        if smaller is not None:
            found, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(found))
    return found


class Journal:
    """Answers by question, one JSON object a line, each flushed to the disk: a killed search continues with them.

    identity: plain data of what the answers depend on; each has its file in the folder.
    """

    def __init__(self, folder: Path, identity: Any) -> None:
        head = json.dumps(identity)
        self.path = folder / f"journal-{hashlib.sha256(head.encode()).hexdigest()[:8]}.jsonl"
        self.answers: dict[str, Any] = {}
        self.asked = self.reused = 0  # answers that were computed here, and those of an earlier process
        folder.mkdir(parents=True, exist_ok=True)
        lines = (
            self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
        )
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                self.answers[entry["question"]] = entry["answer"]
            except (ValueError, TypeError, KeyError):  # cut off by a full disk or a kill
                break
        known = [{"question": question, "answer": answer} for question, answer in self.answers.items()]
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(
            "".join(f"{line}\n" for line in (head, *map(json.dumps, known))), encoding="utf-8"
        )
        temporary.replace(self.path)

    def ask(self, question: str, compute: Callable[[], Any]) -> Any:
        """Return the answer to a question, which is plain data; compute it if the journal lacks it."""
        if question in self.answers:
            self.reused += 1
            return self.answers[question]
        answer = self.answers[question] = json.loads(json.dumps(compute()))
        self.asked += 1
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return answer
