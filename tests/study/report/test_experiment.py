"""Every form of a report begins with what was trained on what, from the files that the study has."""

from pathlib import Path

from referee.pages.document import Paragraph
from referee.pages.markup import to_plain
from study.report.report_data import as_json, build_report
from study.report.report_page import latex_caption, report_document
from tests.runtime.test_config import VALUES
from tests.study.report import rendered
from tests.study.sample_records import a_study


def test_the_first_line_has_model_data_length_and_rate(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    lines = [f"CONFIG_{name}={value}\n" for name, value in VALUES.items()]
    (study / "config").write_text("".join(lines))
    found = as_json(build_report(study))["experiment"]
    assert (found["model"], found["layers"], found["heads"], found["width"]) == ("mini", 4, 4, 128)
    assert found["learning_rate"] == "0.0012"
    for part in ("mini", "4 layers", "width 128", "4 heads", found["data"], "300 updates x 512", "0.0012"):
        assert part in found["text"]
    (study / "config").write_text("".join(line for line in lines if "GRAD_CLIP" not in line))
    assert as_json(build_report(study))["experiment"]["model"] is None


def test_a_study_without_its_configuration_names_what_its_records_have(tmp_path: Path) -> None:
    report = build_report(a_study(tmp_path, seeds=1))
    found = as_json(report)["experiment"]
    assert (found["model"], found["learning_rate"]) == (None, None)
    assert (found["batch"], found["length"], found["updates"]) == (512, 1024, [300])
    text = report.experiment.text
    assert f"{512 * 1024 * 300:,}" in text
    assert "None" not in text
    assert report_document(report, tmp_path).blocks[0] == Paragraph(text)
    plain = " ".join(rendered.terminal(report).split())
    assert plain.startswith(text)
    assert text in to_plain(latex_caption(report))
