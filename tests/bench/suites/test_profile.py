"""The profile suite: a profiled step."""

import pytest

from bench.runner import case_worker
from bench.suites import profile
from tests.bench.sessions import SHAPE


@pytest.mark.usefixtures("workers_here")
def test_a_step_is_profiled_by_its_operations() -> None:
    for case in ("plain", "RALEARN"):
        with case_worker(SHAPE, case, 4) as worker:
            found = worker.call(profile.profile_case, SHAPE, case, 4, 1)
        names = {row["name"] for row in found["operations"]}
        assert any("mm" in name for name in names)
        assert ("aten::_log_softmax" in names) == (case == "plain")
        assert found["step_seconds"] > 0
