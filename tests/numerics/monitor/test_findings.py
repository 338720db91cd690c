"""The monitor of one run names each fault of its part of the corpus, and nothing in a clean run."""

from pathlib import Path

from numerics.monitor.findings import find
from numerics.monitor.tables import TableWriter


def test_an_update_far_larger_than_those_of_its_role_is_named(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / "rank0")
    for step in range(1, 5):
        ratios = {
            "blocks.0.w": 1e-3,
            "blocks.1.w": 0.5 if step > 1 else 1e-3,
            "blocks.2.w": 2e-3,
            "bias": 9.0,
        }
        writer.write("update_ratio", step, [(name, (value,)) for name, value in ratios.items()])
    (found,) = find(tmp_path)
    assert (found.name, found.step) == ("blocks.1.w", 2)
