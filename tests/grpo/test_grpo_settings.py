"""The settings of a GRPO study: the seed's study by default, and what is refused in one line."""

from pathlib import Path

import pytest

from grpo.grpo_settings import GrpoSettings, noise_of, run_name
from runtime.dotconfig import ConfigError, read_symbols
from study import kconfig_commands as commands


def settings(*assignments: str) -> GrpoSettings:
    commands.main(["defconfig", "grpo-gsm8k", *assignments])
    return GrpoSettings.from_symbols(read_symbols(Path(".config")))


def test_the_defaults_are_116_steps_of_two_epochs_over_gsm8k(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = settings()
    assert "CPU study" not in capsys.readouterr().out  # the scale is that of the GPT-2 studies
    assert found.steps(7473) == 116
    assert found.arms == ("baseline", "mild", "qerl", "strong")
    assert (found.seeds, found.evaluate_steps, found.evaluate_limit) == (3, 20, 0)
    assert found.runs[:5] == [(arm, 0) for arm in found.arms] + [("baseline", 1)]


def test_arms_have_the_schedules_of_aqn_and_safe_folders() -> None:
    assert noise_of("baseline") is None
    strong = noise_of("strong")
    assert strong is not None
    assert (strong.start, strong.end, strong.final) == (0.1, 0.001, False)
    own = noise_of("0.2:0.1:5:final")
    assert own is not None
    assert (own.start, own.end, own.intervals, own.final) == (0.2, 0.1, 5, True)
    assert run_name("qerl", 0) == "qerl0"
    assert run_name("0.2:0.1:5", 0) == "0.2-0.1-5.0"


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("CONFIG_GRPO_ARMS=baseline wild", "there is no preset wild"),
        ("CONFIG_GRPO_ARMS=mild", "lacks baseline"),
        ("CONFIG_GRPO_ARMS=baseline mild mild", "names mild twice"),
        ("CONFIG_GRPO_MICRO_BATCH=7", "does not divide 128 problems x 8 responses = 1024"),
        ("CONFIG_GRPO_LEARNING_RATE=0", "is not a number in (0, 1]"),
        ("CONFIG_GRPO_MODEL=", "names no model"),
        ("CONFIG_GRPO_GROUP=1", "out of range"),
    ],
)
def test_a_wrong_value_is_one_line_and_no_config_is_written(
    assignment: str, says: str, elsewhere: Path
) -> None:
    with pytest.raises(ConfigError, match="fix: ") as raised:
        settings(assignment)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (elsewhere / ".config").exists()


def test_the_identity_depends_on_settings_that_change_a_run_alone(elsewhere: Path) -> None:
    first = settings().identity("problems")
    assert settings("CONFIG_SEEDS=5", "CONFIG_GRPO_ARMS=baseline qerl").identity("problems") == first
    assert settings().identity("others") != first
    assert settings("CONFIG_GRPO_LEARNING_RATE=2e-6").identity("problems") != first
