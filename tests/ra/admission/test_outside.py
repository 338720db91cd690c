"""A variant that changes torch, numpy, this project or the process is refused by the name of what it changes."""

import os
import tempfile
from pathlib import Path

import pytest

import gpt2.trainer  # noqa: F401  (the functions that judge)
import ra.custom
from ra import arms
from ra.admission import examine
from ra.admission.probe import Probe
from ra.admission.process import examine_variants
from runtime.settings import AlternationSettings, ModelConfig

STUDY = ModelConfig("test", 2, 2, 16, 16, 0.0)
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
CHECKS = {name: examine.CHECKS[name] for name in ("shape", "state", "step")}
FILE = """
import builtins, functools, os, random, signal, sys, torch
import numpy as np
import torch.nn.functional as F
import gpt2.validation, gpt2.loss
from gpt2.transformer import GPT2, CausalSelfAttention
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {{}}))

class Custom(CausalSelfAttention):
    stochastic = {stochastic}

    def attend(self, q, k, v):
        {called}
        return self.fused(q, k, v)

{loaded}

def attention(layer, spec):
    {built}
    return Custom(spec.width, spec.heads, spec.dropout)
"""
TABLE = Path(__file__).parents[2] / "fixtures/global_changes.tsv"  # a line of code, and what it changes
CHANGES = dict(line.split("\t") for line in TABLE.read_text().splitlines())


def outcome(**code: str) -> str:
    """Load and examine a variant in a fork of this process. Returns its refusal, or "admitted"."""
    blank = {"loaded": "", "built": "pass", "called": "pass", "stochastic": "False"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(FILE.format(**blank | code))
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            arms.CUSTOM_FOLDER, ra.custom.__path__, examine.CHECKS = Path(folder), [folder], CHECKS
            try:
                found = examine.examine(Probe("MINE", STUDY, ALTERNATION)).violations
                text = str(found[0]) if found else "admitted"
            except arms.VariantError as error:
                text = str(error)
            except BaseException as error:
                text = repr(error)
            os.write(sender, text.encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as answer:
            text = answer.read()
        os.waitpid(child, 0)
    return text


@pytest.mark.parametrize(("code", "named"), CHANGES.items())
def test_a_change_at_import_is_refused_by_its_name(code: str, named: str) -> None:
    refusal = outcome(loaded=code)
    assert refusal.startswith(f"MINE: ra/custom/mine.py changes {named} ")
    assert "\n" not in refusal


@pytest.mark.parametrize("code", [*CHANGES][1:-2:4])
def test_a_change_in_a_call_is_refused_by_its_name(code: str) -> None:
    assert outcome(called=code).startswith(f"MINE fails the check outside: a call changes {CHANGES[code]}")


def test_what_changes_nothing_of_others_is_admitted() -> None:
    loaded = "import torch._dynamo, warnings\ncache = {}\nsys.path += ['/']\nwarnings.simplefilter('ignore')"
    assert outcome(loaded=loaded, built="torch.rand(1)", called="torch.no_grad()") == "admitted"


@pytest.mark.parametrize(("code", "stochastic", "refused"), [
    ("torch.rand(1)", "False", True),
    ("torch.rand(1) if self.training else 0", "True", False),
    ("torch.manual_seed(3) if self.training else 0", "True", True),
    ("torch.manual_seed(0)", "False", True),
])  # fmt: skip
def test_a_call_seeds_no_generator_and_draws_only_where_it_is_declared(
    code: str, stochastic: str, refused: bool
) -> None:
    assert ("torch's random numbers" in outcome(called=code, stochastic=stochastic)) == refused


def test_a_subclass_of_tensor_is_no_output() -> None:
    code = "return self.fused(q, k, v).as_subclass(type('Sub', (torch.Tensor,), {}))"
    assert "not a plain tensor" in outcome(called=code)


def test_a_variant_that_changes_its_process_leaves_the_results_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    blank = {"loaded": "", "built": "pass", "stochastic": "False"}
    for name in ("first", "second", "third"):
        code = "torch.set_default_dtype(torch.float64)" if name == "second" else "pass"
        (tmp_path / f"{name}.py").write_text(FILE.format(called=code, **blank))
    found = examine_variants(["FIRST", "SECOND", "THIRD"], STUDY, ALTERNATION)
    assert [[each.check for each in one.violations[:1]] for one in found.values()] == [[], ["outside"], []]
