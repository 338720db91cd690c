"""The page of an examination says whether the variant is admitted, which checks failed, and what it costs."""

import dataclasses

from pages.document import render_terminal
from pages.page import render_html
from ra.admission.results import CHECKS, Cost, Costs, Examination, Outcome
from ra.admission.violation import Violation
from study.admission.page import admission_document

COSTS = Costs(Cost(1100, 2e9, 2.0, None), Cost(1000, 1e9, 1.0, 2**30), 96, None)
PASSED = Examination("MINE", tuple(Outcome(check, "passed", 0.1) for check in CHECKS), (), COSTS)
LEAK = Violation("MINE", "causal", "it <leaks>", "mask it", 3, 7, 0.5, "ra/custom/mine.py", 4)


def test_an_admitted_variant_has_its_checks_and_its_cost() -> None:
    text = render_terminal(admission_document(PASSED, "a shape"))
    assert f"Admitted: MINE passes all {len(CHECKS)} checks." in text
    assert all(f"\n{check} " in text for check in CHECKS)
    assert "1,100" in text
    assert "1.100" in text
    assert "unknown" in text


def test_a_refused_variant_has_its_source_and_fix() -> None:
    refused = dataclasses.replace(PASSED, violations=(LEAK,))
    for text in (
        render_terminal(admission_document(refused, "")),
        render_html(admission_document(refused, "")),
    ):
        assert "Refused" in text
        assert "ra/custom/mine.py:4" in text
        assert "fix: mask it" in text
    assert "it &lt;leaks&gt;" in text
    assert not refused.admitted


def test_an_examination_that_ended_early_is_no_admission() -> None:
    early = dataclasses.replace(PASSED, outcomes=PASSED.outcomes[:2])
    assert not early.admitted
    assert "did not end" in render_terminal(admission_document(early, ""))
