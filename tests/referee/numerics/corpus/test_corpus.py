"""Each case of the corpus with one of its models and modes, in turn; `whole.py` judges all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.referee.numerics.corpus import monitor_faults, repeat_faults
from tests.referee.numerics.corpus.cases import CHECKSUMS, MODES, MODULES, NET, VALUES, Case, Corpus, RunFault
from tests.referee.numerics.corpus.clean import CLEAN
from tests.referee.numerics.corpus.faults import FAULTS
from tests.referee.numerics.corpus.kinds import KINDS
from tests.referee.numerics.corpus.models import OURS, TRANSFORMERS
from tests.referee.numerics.corpus.nets import NET_FAULTS, NET_PAIRS
from tests.referee.numerics.corpus.sound import SOUND
from tests.referee.numerics.corpus.training import PUBLIC, TRAINING
from tests.referee.numerics.corpus.whole import RUN_FAULTS

SMALL = (*NET_FAULTS, *NET_PAIRS, *KINDS, *TRAINING, *SOUND)
SOME = (*KINDS, *TRAINING, *(*NET_FAULTS, *NET_PAIRS, *SOUND)[::2])  # `whole` runs all
ORACLE = [fault for fault in RUN_FAULTS if fault.tool == "oracle"]  # ten seconds each; `whole` runs all
SHORT_RUN_FAULTS = [fault for fault in RUN_FAULTS if fault not in ORACLE[1:-1]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


def in_turn(cases: tuple[Case, ...]) -> Iterator[Any]:
    """Yield each case with one of its models, and a mode; several steps are recorded as checksums."""
    for place, case in enumerate(cases):
        kind = case.kinds[place % len(case.kinds)]
        modes = [CHECKSUMS, VALUES if kind == OURS else MODULES]
        mode = modes[place // 2 % 2] if case.golden.steps == 1 else CHECKSUMS
        mode = CHECKSUMS if mode in case.hidden or case.target.settings else mode
        yield pytest.param(case, kind, mode, id=f"{case.name}, {kind}, {mode}")


@pytest.mark.parametrize(("case", "kind", "mode"), in_turn((*FAULTS, *CLEAN)))
def test_a_fault_is_named_and_a_clean_pair_is_no_divergence(
    case: Case, kind: str, mode: str, corpus: Corpus
) -> None:
    found = corpus.answer(case, kind, mode)
    assert case.is_right(found, kind), found


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_case_of_a_small_model_is_right(case: Case, corpus: Corpus) -> None:
    modes = [mode for mode in MODES if mode not in case.hidden]
    found = corpus.answer(case, NET, modes[SMALL.index(case) % len(modes)])
    assert case.is_right(found, NET), found


def test_a_record_without_order_hides_an_order(corpus: Corpus) -> None:
    hidden = [case for case in FAULTS if case.hidden]
    assert [corpus.answer(case, TRANSFORMERS, MODULES).verdict for case in hidden] == ["rounding"]


def test_the_corpus_has_the_cases_of_the_guide() -> None:
    names = {case.name for case in (*SMALL, *RUN_FAULTS)}
    assert names | {case.name for case in FAULTS} >= {
        name for kinds in PUBLIC.values() for name in kinds.values()
    }
    assert len({case.name for case in (*FAULTS, *CLEAN)}) == len(FAULTS) + len(CLEAN) >= 58
    expected = {
        f"3.{part}" for part in ("1.1", "1.2", "1.3", "2.1.1", "2.1.2", "2.1.3", "2.2.1", "2.2.2", "2.2.3")
    }
    assert {case.guide for case in FAULTS} >= expected


@pytest.mark.parametrize("fault", SHORT_RUN_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_one_run_is_named(fault: RunFault, corpus: Corpus) -> None:
    right, named = fault.answer(corpus)
    assert right, named


def test_without_a_fault_nothing_is_named(tmp_path: Path) -> None:
    assert monitor_faults.train(tmp_path) == []
    assert repeat_faults.repeat(None, repeat_faults.calm_memory()) is None
