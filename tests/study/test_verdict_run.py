"""The values of verdicts that a tracker gets."""

import json
from pathlib import Path

from referee.verdict.statistics import perplexity_percent
from runtime import files
from study.report.report_data import as_json, build_report
from study.trackers import verdict_values
from tests.study.sample_records import a_study


def test_the_sent_values_are_the_numbers_of_the_report(tmp_path: Path) -> None:
    judged = a_study(tmp_path, seeds=3, effect=-0.5)
    files.write_json(judged / "report.json", as_json(build_report(judged)))
    (verdict,) = build_report(judged).verdicts
    interval = verdict.test.difference
    assert interval.low is not None
    assert interval.high is not None
    percents = map(perplexity_percent, (interval.mean, interval.low, interval.high))
    numbers = zip(("percent", "low", "high"), percents, strict=True)
    expected = {f"verdict/RALEARN/{key}": value for key, value in numbers} | {
        "verdict/RALEARN/word": "better",
        "verdict/RALEARN/p": verdict.adjusted_p,
        "verdict/RALEARN/seeds": 3,
    }
    assert verdict_values(judged) == expected


def test_a_damaged_report_has_no_verdict(tmp_path: Path) -> None:
    for text in ("", "[]", '{"verdicts": [{}]}', json.dumps({"verdicts": None})):
        (tmp_path / "report.json").write_text(text)
        assert verdict_values(tmp_path) == {}
