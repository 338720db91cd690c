"""Test the numbers of the page: gaps are paired by run, and every machine has its own line."""

from __future__ import annotations

from referee.verdict.rows import LOSS, Row
from study.evaluation.transfer_matrix import TransferReport, judge_transfer
from study.report.transfer_page import gap_table

PLATFORMS = ["fp32", "foreign:0.1", "foreign:0.2", "foreign:0.1@npu", "foreign:0.2@npu"]
GAPS = {
    "fp32": 0.0,
    "foreign:0.1": 0.125,
    "foreign:0.2": 0.25,
    "foreign:0.1@npu": 0.5,
    "foreign:0.2@npu": 1.0,
}


def report(*missing: tuple[str, int]) -> TransferReport:
    """Three seeds with losses 1, 2, 3 at home. missing: platform and seed without a record."""
    rows = [
        Row("s", "B", seed, "tiny", name, "validation@0", LOSS, 1, 1.0 + seed + GAPS[name])
        for seed in range(3)
        for name in PLATFORMS
        if (name, seed) not in missing
    ]
    verdicts = judge_transfer({}, "fp32", 0.01)
    return TransferReport(["s"], "fp32", "cpu", PLATFORMS, rows, {}, verdicts, [], 0.01)


def test_a_gap_is_of_the_runs_that_have_both_records() -> None:
    found = report(("foreign:0.1", 0), ("fp32", 2))
    assert found.mean_gap("B", "foreign:0.1") == 0.125
    assert found.mean_gap("B", "foreign:0.2") == 0.25
    assert found.mean_gap("RAALL", "foreign:0.2") is None
    assert gap_table(found).rows[0][2:] == ["+0.12500", "+0.25000", "+0.50000", "+1.00000"]
