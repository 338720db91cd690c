"""An examination that ended early admits nothing."""

from ra.admission.results import CHECKS, Cost, Costs, Examination, Outcome
from referee.pages.document import render_terminal
from study.admit import admission_document

COSTS = Costs(Cost(1100, 2e9, 2.0, None), Cost(1000, 1e9, 1.0, 2**30), 96, None)
PASSED = Examination("MINE", tuple(Outcome(check, "passed", 0.1) for check in CHECKS), (), COSTS)


def test_an_examination_that_ended_early_is_no_admission() -> None:
    assert PASSED.admitted
    early = PASSED.replace(outcomes=PASSED.outcomes[:2])
    assert not early.admitted
    assert "did not end" in render_terminal(admission_document(early, ""))
