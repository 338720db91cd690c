"""The data and the file of the view: overflow levels, the order of the tree, keys of a map."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from referee.__main__ import main
from referee.numerics.compare.compare_records import compare_records
from referee.numerics.compare.matched_calls import read_map
from referee.numerics.view.record_view import comparison_tree, record_tree
from tests.referee.numerics.view.records import HOSTILE, tensor, write, write_record

NAN = tensor(1.0, Mean=math.nan)
INF = tensor(math.inf)
COUNTED = tensor(1.0, nan_count=1, inf_count=0)
WIDE = tensor(1.0, Norm=math.inf, nan_count=0, inf_count=0)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "level"),
    [
        ("Functional.gelu", [tensor(1.0)], [tensor(1.0)], ""),
        ("Functional.gelu", [tensor(1.0)], [NAN], "critical"),
        ("Functional.gelu", [tensor(1.0), INF], [INF], "high"),
        ("Functional.softmax", [INF], [tensor(1.0)], "medium"),
        ("Functional.linear", [tensor(1.0)], [tensor(100.0)], ""),
        ("Functional.linear", [tensor(1.0)], [tensor(101.0)], "high"),
        ("Functional.linear", [tensor(1.0)], [WIDE], "high"),  # finite elements, squares overflow
        ("Tensor.masked_fill_", [INF], [tensor(1.0)], ""),
        ("Tensor.masked_fill_", [INF], [INF], "critical"),
        ("Tensor.masked_fill_", [tensor(1.0), NAN], [tensor(1.0)], "medium"),
        ("Torch.empty", [], [NAN], ""),
    ],
)
def test_the_overflow_level_is_that_of_the_manual(
    tmp_path: Path, name: str, inputs: list[Any], outputs: list[Any], level: str
) -> None:
    row = {"input_args": inputs, "input_kwargs": {}, "output": outputs}
    write(tmp_path / "step0/rank0", {f"{name}.0.forward": row}, {})
    (node,) = record_tree(tmp_path)["steps"][0]["nodes"]
    assert node["levels"] == [level, ""]


def test_the_keys_of_unmatched_modules_match_them_in_a_map(tmp_path: Path) -> None:
    write_record(tmp_path / "a", name="layers", kind="Layer")
    write_record(tmp_path / "b", name="h.inner", blocks=4)
    (tmp_path / "given.json").write_text('{"layers.0": "h.inner.0"}')
    found = comparison_tree(
        compare_records(tmp_path / "a", tmp_path / "b", read_map(tmp_path / "given.json")), {}
    )
    alone = [node for node in found["steps"][0]["nodes"] if node["grade"] == "unmatched"]
    keys = [
        [node["path"] for node in alone if node[side] and not node["depth"]] for side in ("target", "golden")
    ]
    assert keys[0]
    names = {"layers.0": "h.inner.0", **dict(zip(*keys, strict=False))}
    rows = compare_records(tmp_path / "a", tmp_path / "b", names).steps[0].rows
    assert all(row.golden for row in rows if row.target)


def test_a_name_ends_no_script(tmp_path: Path) -> None:
    write_record(tmp_path / "a", name=HOSTILE)
    assert main(["view", "-tp", str(tmp_path / "a"), "-o", str(tmp_path / "new/tree.html")]) == 0
    page = (tmp_path / "new/tree.html").read_text()
    assert "</script><img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "http" not in page.replace("http-equiv", "")
