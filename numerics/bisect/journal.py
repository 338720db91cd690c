"""A journal of answers: a search that was killed continues with the answers that it had.

One JSON object a line, each flushed to the disk before the search goes on. The first line identifies the search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numerics.errors import NumericsError

SCHEMA = 1


class Journal:
    """Answers by question. identity: plain data of what the answers depend on; another one starts another journal.

    asked: answers that were computed here. reused: answers of an earlier process.
    """

    def __init__(self, path: Path, identity: Any) -> None:
        self.path = path
        self.answers: dict[str, Any] = {}
        self.asked = self.reused = 0
        head = {"schema": SCHEMA, "identity": json.loads(json.dumps(identity))}
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = _complete_lines(path)
        if complete and complete[0] == head:
            self.answers = {line["question"]: line["answer"] for line in complete[1:]}
        elif path.exists():
            path.replace(_unused(path))
            complete = []
        lines = complete or [head]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        temporary.replace(path)  # without a line that was cut off

    def ask(self, question: str, compute: Callable[[], Any]) -> Any:
        """Return the answer to a question, which is plain data; compute it if the journal lacks it."""
        if question in self.answers:
            self.reused += 1
            return self.answers[question]
        answer = json.loads(json.dumps(compute()))
        self.asked += 1
        self.answers[question] = answer
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return answer


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal up to the first that was cut off."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror}; fix: move it away, or name another folder"
        ) from error
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not ({"question", "answer"} <= value.keys() or not found):
            break
        found.append(value)
    return found


def _unused(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")
