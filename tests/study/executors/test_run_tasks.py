"""Tasks of an executor with fewer slots than tasks."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from study.executors.executor import Ended, Message, Started, Task, run_tasks


class TwoSlots:
    """Ends the first task that is there at each look; `broken` fails."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.most = 0
        self.stopped: list[str] = []

    def slots(self) -> int:
        return 2

    def submit(self, task: Task) -> None:
        self.here.append(task.name)
        self.most = max(self.most, len(self.here))

    def poll(self, seconds: float) -> Sequence[Message]:
        name = self.here.pop(0)
        if name == "broken":
            raise OSError("a reader failed")
        return [Started(name), Ended(name, len(name))]

    def stop(self, names: Sequence[str]) -> None:
        self.stopped += names

    def close(self) -> str:
        return ""


def tasks(*names: str) -> list[Task]:
    return [Task(Path(name) / "plan.json", Path("log")) for name in names]


def test_as_many_tasks_as_slots_run_at_once_and_their_ends_are_in_order() -> None:
    executor = TwoSlots()
    ended = run_tasks(executor, tasks("a", "bb", "ccc", "dddd", "eeeee"))
    assert executor.most == 2
    assert [one.status for one in ended] == [1, 2, 3, 4, 5]


def test_after_an_error_all_tasks_that_have_not_ended_are_stopped() -> None:
    executor = TwoSlots()
    with pytest.raises(OSError, match="a reader failed"):
        run_tasks(executor, tasks("a", "broken", "c", "d"))
    assert executor.stopped == ["broken", "c", "d"]
