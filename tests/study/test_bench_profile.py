"""The bench of operations: shares of what was seen, largest first, and a real step looked at."""

import dataclasses
from typing import Any

from scripts import bench_profile
from study import bench

SHAPE = bench.Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4)))


def seen(**seconds: float) -> dict[str, Any]:
    rows = [{"name": name, "seconds": value, "calls": 1.0} for name, value in seconds.items()]
    return {"step_seconds": 1.5, "page_faults": 1234, "operations": rows}


def test_operations_are_listed_by_their_largest_share_of_any_case() -> None:
    lines = bench_profile.text({"plain": seen(mm=0.2, sqrt=0.8), "B": seen(mm=0.9, gelu=0.1)}).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["mm", "sqrt", "gelu"]
    assert lines[1].split()[1:] == ["200", "(20.0%)", "900", "(90.0%)"]
    assert lines[2].split()[1:] == ["800", "(80.0%)", "-"]
    assert lines[-1].split()[-2:] == ["1,234", "1,234"]


def test_a_step_is_looked_at_in_a_process_of_its_own() -> None:
    for case in ("plain", "RALEARN"):
        found = bench_profile.in_a_process(dataclasses.replace(SHAPE), case, 4, 1)
        names = {row["name"] for row in found["operations"]}
        assert any("mm" in name for name in names)
        assert ("aten::_log_softmax" in names) == (case == "plain")
        assert found["step_seconds"] > 0
