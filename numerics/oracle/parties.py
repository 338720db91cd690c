"""Compare a device with a benchmark device: both against float64 on the CPU (section 2.4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numerics.dump_files import read_json
from numerics.errors import NumericsError
from numerics.oracle.results import Check, from_json

RESULTS = "oracle.json"
WORSE, BOTH, LARGER, NOT_LARGER, OTHER_WRONG = (
    "wrong on this device alone",
    "wrong on both",
    "larger, within rounding",
    "not larger",
    "wrong on the benchmark alone",
)
GRADES = (WORSE, BOTH, OTHER_WRONG, LARGER, NOT_LARGER)


@dataclass(frozen=True)
class MachineResults:
    """The checks of another machine, by key. device: in words."""

    device: str
    checks: dict[tuple[str, ...], Check]


@dataclass(frozen=True)
class Party:
    """A check of this device and the same check of the benchmark device, on the same inputs."""

    check: Check
    other: Check

    @property
    def grade(self) -> str:
        """Say whether the distance to float64 is larger on this device, and whether it is wrong."""
        if self.check.wrong:
            return BOTH if self.other.wrong else WORSE
        if self.other.wrong:
            return OTHER_WRONG
        return LARGER if self.check.measured.distance > self.other.measured.distance else NOT_LARGER


def read_results(path: Path) -> MachineResults:
    """Read oracle.json of another machine, or a folder with it. NumericsError where it cannot be used."""
    file = path / RESULTS if path.is_dir() else path
    fix = "run the check on the other machine and copy its oracle.json"
    content = read_json(file, fix)
    try:
        checks = [from_json(row) for row in content["rows"]]
        return MachineResults(str(content["device"]), {check.key: check for check in checks})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise NumericsError(f"{file} holds no results of this check ({reason}); fix: {fix}") from error


def parties(checks: Sequence[Check], other: MachineResults) -> tuple[list[Party], int]:
    """Pair the checks of two machines. Returns them, worst first, and how many had other inputs or no partner."""
    pairs, alone = [], 0
    for check in checks:
        if not check.how.startswith("device"):
            continue
        partner = other.checks.get(check.key)
        if partner is None or partner.digest != check.digest:
            alone += 1
        else:
            pairs.append(Party(check, partner))
    return sorted(pairs, key=lambda pair: (GRADES.index(pair.grade), -pair.check.measured.ratio)), alone
