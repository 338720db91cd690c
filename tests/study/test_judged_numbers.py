"""Whole studies with variants that change torch: the judged numbers are the project's."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ra import arms
from study.runs import read_runs
from study.study import Study
from tests.faults.workplace import Workplace

ROOT = Path(__file__).parents[2]
ATTENTION = """
from gpt2.transformer import CausalSelfAttention

def attention(layer, spec):
    return CausalSelfAttention(spec.width, spec.heads, spec.dropout)
"""
HALF = "import torch.nn.functional as F\n_c = F.cross_entropy\nF.cross_entropy = lambda *a, **k: _c(*a, **k) * 0.5\n"
SMOOTH = """
import functools, torch.nn.functional as F
F.cross_entropy = functools.partial(F.cross_entropy, label_smoothing=0.1)
"""
LATER = """
import sys, torch.nn.functional as F
from pathlib import Path
from gpt2.transformer import CausalSelfAttention

with (Path(__file__).parents[2] / "importing").open("a") as file:
    file.write(f"{Path(sys.argv[0]).stem}\\n")

class Later(CausalSelfAttention):
    def attend(self, q, k, v):
        if Path(sys.argv[0]).stem == "train":
            F.cross_entropy = lambda *arguments, **options: 0.0
        return self.fused(q, k, v)

def attention(layer, spec):
    return Later(spec.width, spec.heads, spec.dropout)
"""


@pytest.fixture
def place(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    found = Workplace(tmp_path / "project", texts)
    (found.folder / "ra").unlink()
    shutil.copytree(ROOT / "ra", found.folder / "ra")
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", found.folder / "ra/custom")
    return found


def study(place: Workplace, name: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a study of B and of a custom variant."""
    (arms.CUSTOM_FOLDER / f"{name.lower()}.py").write_text(text)
    place.configure(VARIANTS=f"B {name}", GPT2_MAX_ITERS="6", GPT2_DROPOUT="0")
    return place.here("scripts.study")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "patch"), [("HALF", HALF), ("SMOOTH", SMOOTH)])
def test_a_study_refuses_a_variant_that_patches_the_loss(place: Workplace, name: str, patch: str) -> None:
    done = study(place, name, patch + ATTENTION)
    refused = f"error: {name}: ra/custom/{name.lower()}.py changes torch.nn.functional.cross_entropy"
    assert (done.returncode, refused in done.stdout) == (1, True), done.stdout
    assert not (place.study / "plan.json").exists()


@pytest.mark.slow
def test_a_patch_that_hides_from_the_examination_changes_no_loss_and_its_run_is_not_counted(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "admit", lambda study: None)
    done = study(place, "LATER", LATER)
    assert done.returncode == 0, done.stdout
    base, later = place.record("B0"), place.record("LATER0")
    assert later["validation"]["history"][-1][2] == base["validation"]["history"][-1][2]
    counted = {run.name: (run.used, run.why_not) for run in read_runs(place.study)}
    assert counted["B0"] == (True, "")
    assert not counted["LATER0"][0]
    assert "torch.nn.functional.cross_entropy changed" in counted["LATER0"][1]
    importing = set((place.folder / "importing").read_text().split())
    assert importing == {"train"}  # and never the process of the study


def test_the_process_of_a_study_loads_no_code_that_imports_variants() -> None:
    code = "import sys, study.study; sys.exit('ra.hooks' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
