"""Commands in README and docs: configurations can be written; targets and variables exist and a test runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ra import arms
from study import kconfig_commands as commands
from study.make_arguments import variables_by_target
from tests.checkout import link_project

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Target of the Makefile -> a test file that runs its script from beginning to end.
RUN_BY = {
    "": "tests/study/test_study.py",
    "admit": "tests/scripts/test_admit_command.py",
    "transfer": "tests/scripts/test_transfer_command.py",
    "evaluate": "tests/scripts/test_evaluate_command.py",
    "bisect": "tests/scripts/test_bisect_command.py",
    "attention": "tests/study/evaluation/test_inspect.py",
    "bench": "tests/scripts/test_bench_command.py",
    "card": "tests/bench/test_card.py",
    "check": "tests/scripts/dev/test_setup.py",
    "check-config": "tests/referee/numerics/setup/test_check_config.py",
    "clean": "tests/scripts/dev/test_clean.py",
    "compare": "tests/study/compare/test_build.py",
    "compare-records": "tests/referee/numerics/compare/test_command.py",
    "control": "tests/ra/test_control.py",
    "data": "tests/faults/data.py",
    "demo": "tests/scripts/test_demo_command.py",
    "diagnose": "tests/scripts/test_diagnose_command.py",
    "export": "tests/scripts/test_export_command.py",
    "faults": "tests/faults/test_faults.py",
    "help": "tests/scripts/dev/test_help.py",
    "lm-eval": "tests/scripts/test_lm_eval_command.py",
    "logp-diff": "tests/scripts/test_logp_diff_command.py",
    "memory": "tests/scripts/test_memory.py",
    "menuconfig": "tests/study/test_kconfig_commands.py",
    "mrproper": "tests/scripts/dev/test_clean.py",
    "monitor": "tests/scripts/test_monitor_command.py",
    "olddefconfig": "tests/study/test_kconfig_commands.py",
    "oracle": "tests/scripts/test_oracle_command.py",
    "pack-run": "tests/scripts/test_pack_run_command.py",
    "plan": "tests/scripts/test_plan_command.py",
    "record": "tests/scripts/test_record_command.py",
    "repeat": "tests/scripts/test_repeat_command.py",
    "report": "tests/study/report/test_build.py",
    "sample": "tests/scripts/test_sample_command.py",
    "savedefconfig": "tests/study/test_kconfig_commands.py",
    "status": "tests/study/test_status_table.py",
    "trend": "tests/scripts/test_trend_command.py",
    "stress": "tests/referee/numerics/runs/test_stress_devices.py",
    "verify": "tests/study/test_integrity.py",
}


FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Fenced blocks without a language, and blocks indented by four spaces that begin with a command."""
    every = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    fenced = [block for language, block in every if not language]
    indented = re.findall(r"(?:^    make .*\n(?:^    .*\n)*)", FENCED.sub("", text), re.MULTILINE)
    return [*fenced, *indented]


def make_calls(text: str) -> list[list[str]]:
    """The words behind each `make` in the code blocks and in inline code, without comments and continuations."""
    code = "\n".join(blocks(text)).replace("\\\n", " ")
    inline = re.findall(r"`(make(?: [^`\n]+)?)`", FENCED.sub("", text))
    calls = []
    for line in [*code.splitlines(), *inline]:
        for command in re.split(r"&&|;", line.split(" #")[0]):
            words = shlex.split(command)
            if words and words[0] == "make":
                calls.append([word for word in words[1:] if not word.startswith("PYTHON=")])
    return calls


ALL = sorted({tuple(call) for page in PAGES for call in make_calls(page.read_text(encoding="utf-8"))})
CONFIGURING = [call for call in ALL if call and call[0].startswith("defconfig-") and "NAME" not in call[0]]
OTHERS = [call for call in ALL if not call or not call[0].startswith("defconfig-")]


@pytest.mark.parametrize("call", CONFIGURING, ids=" ".join)
def test_every_defconfig_command_of_the_docs_writes_a_configuration(
    call: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    custom = tmp_path / "custom"
    custom.mkdir()
    for page in PAGES:  # the custom variants that the docs show
        for file in re.findall(r"`ra/custom/(\w+\.py)`", page.read_text(encoding="utf-8")):
            (custom / file).touch()
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", custom)
    for file in ("texts/a.txt", "wiki.test.raw"):  # the texts of CONFIG_EVAL_SETS
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("text")
    assignments = [word for word in call[1:] if word.startswith("CONFIG_")]
    assert len(assignments) == len(call) - 1
    commands.main(["defconfig", call[0].removeprefix("defconfig-"), *assignments])
    assert (tmp_path / ".config").exists()


@pytest.mark.parametrize("call", OTHERS, ids=" ".join)
def test_every_make_target_of_the_docs_exists_with_its_variables_and_is_run_by_a_test(
    call: tuple[str, ...],
) -> None:
    targets = [word for word in call if "=" not in word]
    assert len(targets) <= 1
    target = targets[0] if targets else ""
    assert target in RUN_BY, f"no test is known to run make {target}"
    assert (ROOT / RUN_BY[target]).exists()
    if target:
        assert re.search(rf"^(?:[\w-]+ )*{re.escape(target)}(?: [\w-]+)*:", MAKEFILE, re.MULTILINE)
    for word in call:
        name, sign, _ = word.partition("=")
        if sign and not (target in ("memory", "import") and name.startswith("CONFIG_")):
            assert name in variables_by_target(MAKEFILE).get(target, []), f"make {target} reads no {name}="
