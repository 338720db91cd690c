"""The simulation judges as the report does, and its tables have the error rates of the rule."""

import numpy as np
import pytest

from scripts.dev import simulate_verdicts as tested
from study.analysis.verdict import BETTER, EQUIVALENT, WORSE, judge


@pytest.mark.parametrize("looks", [(3,), (5,), (3, 6), (3, 4, 5)])
def test_many_studies_are_judged_as_one_is(looks: tuple[int, ...]) -> None:
    values = tested.differences(np.random.default_rng(looks), 300, looks[-1])[0]
    values += np.linspace(-0.02, 0.02, 300)[:, None]
    found, words = tested.judge_all(values, looks), []
    for number, study in enumerate(values.tolist()):
        table = {"B": dict.fromkeys(range(len(study)), 0.0), "RALEARN": dict(enumerate(study))}
        (verdict,) = judge(table, looks={"RALEARN": looks})
        words.append(verdict.word)
        assert verdict.test.difference.high == pytest.approx(
            found.mean[number] + found.half[number], abs=1e-12
        )
    assert [word in (BETTER, WORSE) for word in words] == found.called.tolist()
    assert [word == EQUIVALENT for word in words] == found.equivalent.tolist()
    assert {BETTER, WORSE} <= set(words)


def test_without_an_effect_5_percent_are_called_at_one_look_and_at_ten() -> None:
    """20,000 studies; 0.7 points are four standard errors."""
    for ratio in (1, 10):
        values = tested.differences(np.random.default_rng(ratio), 20_000, 12, ratio)[0]
        one = tested.judge_all(values, (5,)).called.mean()
        ten = tested.any_look(values, range(3, 13)).mean()
        assert (one, ten) == (pytest.approx(0.047, abs=0.007), pytest.approx(0.05, abs=0.007))


def test_the_exploratory_family_and_the_equivalence_errors_keep_5_percent() -> None:
    for row in tested.family(5000)[1:]:
        assert float(row[2]) < 6.3
        assert float(row[4]) < 6.3
    assert all(float(cell) < 6.3 for row in tested.equivalence(5000)[1:] for cell in row[1:4])
