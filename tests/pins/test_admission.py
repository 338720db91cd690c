"""The pinned table of admissions has a row for each variant of the tests, and no other."""

from __future__ import annotations

from ra.arms import LEARNED
from tests.pins.admission import ADMITTED, results
from tests.ra.admission.broken_parts import BROKEN_PARTS
from tests.ra.admission.test_broken_parts import arm_of
from tests.ra.admission.test_builtin import COMBINED, FIXED
from tests.ra.admission.test_corpus import BROKEN, CORRECT
from tests.ra.admission.test_process import REFUSED
from tests.ra.test_custom import DOCUMENTED


def test_each_variant_of_the_tests_has_a_row() -> None:
    parts = {arm_of(name, attention) for name in BROKEN_PARTS for attention in ("", LEARNED)}
    refused = {*BROKEN, *parts, *REFUSED, "UNROTATED+POSITION=rotary"}
    admitted = {*CORRECT, *FIXED, *COMBINED, LEARNED, *DOCUMENTED, "UNROTATED", "FINE"}
    assert results().keys() == refused | admitted
    assert {name for name, result in results().items() if result == ADMITTED} == admitted
