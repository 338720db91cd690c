"""A slower machine is reported once, with both end times."""

import datetime

from study.runner.status_text import SpeedCheck

NOON = datetime.datetime(2026, 11, 22, 12, 0)


def test_runs_that_take_as_long_as_planned_are_not_reported() -> None:
    check = SpeedCheck()
    for trained in (60.0, 70.0, 50.0):
        assert check.observe(60.0, trained, trained + 10, 5, NOON) == ""


def test_a_slower_machine_is_reported_once_with_the_old_and_the_new_end() -> None:
    """Ten runs: one done, of 120 s instead of 60 s and 60 s besides; nine more end at 12:27 instead of 12:17."""
    check = SpeedCheck()
    message = check.observe(60.0, 120.0, 180.0, 9, NOON)
    assert "a run trains for 2m 00s instead of 1m 00s" in message
    assert "ends at about 12:27 instead of 12:17" in message
    assert check.observe(60.0, 240.0, 300.0, 8, NOON) == ""


def test_one_slow_run_among_runs_as_planned_is_not_a_slower_machine() -> None:
    check = SpeedCheck()
    assert check.observe(60.0, 60.0, 70.0, 5, NOON) == ""
    assert check.observe(60.0, 60.0, 70.0, 4, NOON) == ""
    assert check.observe(60.0, 90.0, 100.0, 3, NOON) == ""


def test_the_last_run_and_a_plan_without_times_are_not_reported() -> None:
    check = SpeedCheck()
    assert check.observe(60.0, 600.0, 700.0, 0, NOON) == ""
    assert check.observe(None, 600.0, 700.0, 9, NOON) == ""
