"""The corpus of faults: the changed module or the cause is the first divergence, in two models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from numerics.compare.run import compare_records
from tests.numerics.corpus.clean import math_attention
from tests.numerics.corpus.corpus import FaultCorpus, pinned, record_run
from tests.numerics.corpus.faults import CHECKSUMS, FAULTS, MODULES, VALUES, PairSide, PlantedFault
from tests.numerics.corpus.models import OURS, TRANSFORMERS, adamw


def modes_of(fault: PlantedFault, kind: str) -> list[str]:
    """Return checksums and the model's further mode, without modes that the fault does not show in."""
    further = VALUES if kind == OURS else MODULES
    several_steps = fault.golden.steps > 1
    return [CHECKSUMS] if several_steps or further in fault.hidden else [CHECKSUMS, further]


def cases() -> Iterator[Any]:
    """Each fault with one of its models and modes, in turn. `make bench SUITE=numerics` runs all of them."""
    for place, fault in enumerate(FAULTS):
        kind = fault.kinds[place % len(fault.kinds)]
        modes = modes_of(fault, kind)
        mode = modes[place // 2 % len(modes)]
        yield pytest.param(fault, kind, mode, id=f"{fault.name}, {kind}, {mode}")


CASES = list(cases())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> FaultCorpus:
    return FaultCorpus(tmp_path_factory.mktemp("corpus"))


def test_the_corpus_has_thirty_faults_and_the_cases_of_the_guide() -> None:
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(len(fault.kinds) == 2 for fault in FAULTS) >= 30
    sections = {fault.case for fault in FAULTS}
    assert sections >= {
        "3.1.1",
        "3.1.2",
        "3.1.3",
        *(f"3.2.1.{n}" for n in (1, 2, 3)),
        *(f"3.2.2.{n}" for n in (1, 2, 3)),
    }


@pytest.mark.parametrize(("fault", "kind", "mode"), CASES)
def test_the_fault_is_named(fault: PlantedFault, kind: str, mode: str, corpus: FaultCorpus) -> None:
    answer = corpus.answer(fault, kind, mode)
    assert answer.right, answer.found
    assert answer.line in pinned()


@pytest.mark.parametrize(
    ("wrong", "groups", "mode"),
    [
        ({"rate": 2e-3}, "groups: ", VALUES),
        ({"rate": 2e-3}, "groups: ", MODULES),
        ({"decay_norms": True, "decay": 1.0}, "norms", CHECKSUMS),
    ],
    ids=["rate, values", "rate, modules", "decay on norms, checksums"],
)
def test_a_wrong_optimizer_is_named_where_gradients_differ_by_rounding(
    wrong: dict[str, Any], groups: str, mode: str, corpus: FaultCorpus
) -> None:
    right = {"decay": 1.0} if "decay" in wrong else {}
    golden = corpus.golden(PairSide(optimizer=adamw(**right), steps=2), OURS, mode)
    target = PairSide(optimizer=adamw(**wrong), steps=2, around=math_attention)
    comparison = compare_records(record_run(corpus.folder, target, OURS, mode), golden)
    assert comparison.steps[0].judgement.verdict == "rounding"
    assert comparison.first
    step, first = comparison.first
    assert (step.place, first.cause) == ("step1/rank0", "optimizer"), first.why
    assert groups in first.why


def test_a_record_without_order_hides_an_order(corpus: FaultCorpus) -> None:
    hidden = [fault for fault in FAULTS if fault.hidden]
    assert [corpus.answer(fault, TRANSFORMERS, MODULES).right for fault in hidden] == [False] * len(hidden)
