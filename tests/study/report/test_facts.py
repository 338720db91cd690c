"""The table of the experiment in report.html: each value once, with the runs that have it."""

import re
from pathlib import Path

from tests.study.report.rendered import outline, page
from tests.study.sample_records import ENVIRONMENT, a_study, edit


def facts(text: str) -> dict[str, list[str]]:
    """The page's table of the experiment, as markup: entry -> values."""
    found: dict[str, list[str]] = {}
    entry = ""
    table = text.partition(">Experiment and fingerprint</h2>")[2].partition("</table>")[0]
    for name, value in re.findall(r'<tr><t[hd][^>]*>(.*?)</t[hd]><td class="text">(.*?)</td></tr>', table):
        entry = name or entry  # only the first value has the name
        found.setdefault(entry, []).append(value)
    return found


def test_each_value_of_the_environment_is_listed_once_with_the_runs_that_have_it(
    tmp_path: Path,
) -> None:
    study = a_study(tmp_path, seeds=2, variants=("B", "RAALL"))
    evil = "<img src=x onerror=alert(1)>"
    edit(study, "B1", environment={
        "numpy": "2.3.2", "variables": {"OMP_NUM_THREADS": evil},
        "code": ENVIRONMENT["code"] | {"ra.custom.mine": "aaaa", evil: "bbbb"},
    })  # fmt: skip
    text = page(study)
    outline(text)
    found = facts(text)
    for name, key in (("Python", "python"), ("CUDA", "cuda"), ("float32 products", "float32_matmul"),
                      ("CPU threads", "threads"), ("platform", "platform"), ("cuDNN or MIOpen", "cudnn")):  # fmt: skip
        assert found[name] == [str(ENVIRONMENT[key])]
    assert "ROCm" not in found
    assert found["NumPy"] == ["2.3.1 (3 runs)", "2.3.2 (1 run)"]
    inert = evil.replace("<", "&lt;").replace(">", "&gt;")
    assert found["variables"] == [f"<code>OMP_NUM_THREADS={inert} (1 run)</code>"]
    mine, parts = ENVIRONMENT["code"].values()
    lines = [f"{inert} bbbb (1 run)", f"ra.custom.mine {mine} (3 runs)", "ra.custom.mine aaaa (1 run)",
             f"ra.custom.parts {parts}"]  # fmt: skip
    assert found["custom source"] == [f"<code>{line}</code>" for line in lines]


def test_unset_variables_are_stated(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1, variants=("B",))
    assert facts(page(study))["variables"] == ["none set that changes numbers"]
