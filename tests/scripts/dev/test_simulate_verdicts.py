import pytest

from scripts.dev import simulate_verdicts


@pytest.mark.parametrize("ratio", [1.0, 4.0, 10.0])
def test_false_positives_and_coverage_have_their_nominal_rates_in_simulated_studies(ratio: float) -> None:
    simulated = simulate_verdicts.simulate(3000, seeds=5, ratio=ratio)
    assert 0.038 <= simulated.decided <= 0.062  # three standard errors
    assert 0.938 <= simulated.covered <= 0.962
    assert simulated == simulate_verdicts.simulate(3000, seeds=5, ratio=ratio)


def test_power_grows_with_the_effect_and_with_the_seeds() -> None:
    small, large = (simulate_verdicts.simulate(500, 3, effect=effect).decided for effect in (0.01, 0.03))
    more = simulate_verdicts.simulate(500, 7, effect=0.01).decided
    assert small < large
    assert small < more
    assert simulate_verdicts.simulate(500, 7, effect=-0.03).wrong_sign == 0


def test_the_tables_have_a_row_for_every_cell() -> None:
    rows = len(simulate_verdicts.RATIOS) * len(simulate_verdicts.SEEDS)
    assert len(simulate_verdicts.calibration(2)) == 1 + rows
    assert len(simulate_verdicts.power(2)) == 1 + len(simulate_verdicts.POWER_SEEDS)
