"""Test the names of the variants and their reciprocal layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra import arms
from ra.arms import VariantError, reciprocal_layers, refuse_misnamed_files
from runtime.errors import UserError

LAYERS = st.integers(1, 60)


@given(LAYERS)
def test_early_and_late_partition_the_layers_of_all(layers):
    early, late = reciprocal_layers("RAEARLY", layers), reciprocal_layers("RALATE", layers)
    assert early | late == reciprocal_layers("RAALL", layers) == frozenset(range(layers))
    assert early & late == reciprocal_layers("B", layers) == frozenset()
    assert len(early) == layers // 2
    assert not early or max(early) < min(late)


@given(LAYERS.flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_any_set_of_layers_can_be_listed_by_numbers_and_ranges(case):
    layers, chosen = case
    assert reciprocal_layers("RA:" + ",".join(map(str, sorted(chosen))), layers) == chosen
    runs: list[list[int]] = []
    for layer in sorted(chosen):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    assert reciprocal_layers("RA:" + ",".join(f"{a}-{b}" for a, b in runs), layers) == chosen


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RALERN", "did you mean RALEARN?"),
        ("XYZ", "RA:5-7,9"),
        ("RA:12", "no layer 12; fix: use layers 0 to 11"),
        ("RA:7-5", "descending; fix: 5-7"),
        ("RA:1-3,2", "layer 2 is listed twice"),
        ("RA:²", "malformed"),
    ],
)
def test_an_unknown_variant_is_refused_in_one_line(name, says):
    with pytest.raises(VariantError) as caught:
        reciprocal_layers(name, 12)
    assert isinstance(caught.value, UserError)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            "b.py",
            r"built-in variant B, .*; fix: rename it, for example to ra/custom/my_b.py \(variant MY_B\)",
        ),
        ("RaLearn.py", "built-in variant RALEARN"),
        ("AbsKeys.py", "upper-case letters; .*ra/custom/abskeys.py"),
        ("2heads.py", "is not a variant name; .*my_2heads.py"),
        ("a.b.py", "is not a variant name"),
    ],
)
def test_a_custom_file_with_an_impossible_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, says: str
) -> None:
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "abs_keys2.py").touch()
    refuse_misnamed_files()
    (tmp_path / file).touch()
    with pytest.raises(VariantError, match=f"ra/custom/{file} .*{says}"):
        refuse_misnamed_files()
