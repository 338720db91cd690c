import itertools
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import equivalent_code
from gpt2.artifacts.equivalent_code import changed_code, equivalent_versions, former_digests
from study.compare import build, checklist_rows
from tests.study.compared import (
    SCORE,
    VARIANTS,
    Change,
    Settings,
    a_study,
    recorded,
    setting,
    terminal,
    unchanged,
)


def schedule(value: dict[str, Any], config: Settings) -> None:
    value["schedule"]["iterations"] = value["progress"]["iterations"] = 200


def own_schedule(value: dict[str, Any], config: Settings) -> None:
    if value["variant"] == "RALEARN":
        value["schedule"]["iterations"] = value["progress"]["iterations"] = 90


# One difference each: the change of the second study, the row that must name it, its level, and a word of it.
ONE_THING = [
    (recorded("fingerprint", "data", to="other"), "data", "fatal", "other"),
    (recorded("fingerprint", "tokenizer", to="other"), "tokenizer", "fatal", "other"),
    (recorded("fingerprint", "validation", to="other"), "validation set", "fatal", "other"),
    (recorded("hellaswag", to=SCORE | {"items_sha256": "other"}), "HellaSwag items", "harmless", "SHA-256 other"),
    (recorded("fingerprint", "model", to="other"), "model", "fatal", "other"),
    (recorded("parameters", to=1001), "parameters", "fatal", "1,001"),
    (recorded("fingerprint", "initial_weights", to="other"), "initial weights", "fatal", "other"),
    (recorded("batch", "effective", to=16), "effective batch", "fatal", "16"),
    (recorded("batch", "block_size", to=128), "sequence length", "fatal", "128"),
    (recorded("fingerprint", "batch", to="other"), "batch and dropout", "harmless", "other"),
    (recorded("batch", "micro", to=2), "micro-batch x accumulation x processes", "harmless", "2 x 2 x 1"),
    (schedule, "schedule", "fatal", "200 of 200 iterations"),
    (own_schedule, "schedule", "fatal", "90 of 90 iterations"),
    (recorded("schedule", "warmup_iterations", to=7), "schedule", "fatal", "7 of warm-up"),
    (recorded("schedule", "iterations", to=101), "schedule", "fatal", "100 of 101 iterations"),
    (recorded("target", "dtype", to="float32"), "precision", "fatal", "float32"),
    (recorded("environment", "float32_matmul", to="highest"), "float32 products", "fatal", "highest"),
    (recorded("target", "attention_backend", to="efficient"), "attention backend", "harmless", "efficient"),
    (recorded("target", "device", to="another card"), "device", "harmless", "another card"),
    (recorded("target", "driver", to="560"), "driver", "harmless", "560"),
    (recorded("environment", "cuda", to="13.0"), "CUDA or ROCm", "harmless", "13.0"),
    (recorded("environment", "cudnn", to="90000"), "cuDNN or MIOpen", "harmless", "90000"),
    (recorded("environment", "threads", to=2), "CPU threads", "harmless", "2"),
    (recorded("environment", "platform", to="Linux aarch64"), "platform", "harmless", "aarch64"),
    (recorded("target", "torch", to="2.12.0"), "torch", "harmless", "2.12.0"),
    (recorded("environment", "numpy", to="2.0.0"), "numpy", "harmless", "2.0.0"),
    (recorded("environment", "python", to="3.12.1"), "python", "harmless", "3.12.1"),
    (recorded("fingerprint", "numbers", to=2), "numbers", "fatal", "2"),
    (recorded("commit", to="e" * 40), "commit", "harmless", "eeee"),
    (recorded("dirty", to=True), "uncommitted changes", "harmless", "yes"),
    (recorded("environment", "code", "gpt2.train.optimizer", to="eeee"),
     "code that computes", "fatal", "train.optimizer eeee"),
    (recorded("environment", "code", "ra.new", to="eeee"), "code that computes", "fatal", "ra.new"),
    (recorded("environment", "code", "study.runner.plan", to="eeee"),
     "code that plans and reports", "harmless", "eeee"),
    (recorded("environment", "variables", to={"NVIDIA_TF32_OVERRIDE": "0"}), "NVIDIA_TF32_OVERRIDE", "fatal", "0"),
    (recorded("environment", "variables", to={"MKL_CBWR": "AVX2"}), "MKL_CBWR", "harmless", "AVX2"),
    (recorded("fingerprint", "schedule", to="other"), "optimizer and budget (hash)", "fatal", "other"),
    *(
        (setting({name: '"0.123"'}), name, "fatal", "0.123")
        for name in (
            "LEARNING_RATE", "MIN_LEARNING_RATE_RATIO", "WARMUP_FRACTION", "WEIGHT_DECAY", "ADAM_BETA1",
            "ADAM_BETA2", "ADAM_EPSILON", "GRAD_CLIP", "ALTERNATION_INIT", "A_SYMBOL_OF_TOMORROW",
        )
    ),
    (setting({"ALTERNATION_MIX_OUTPUT": "n", "ALTERNATION_MIX_SCORE": "y"}), "ALTERNATION_MIX", "fatal", "score"),
    (setting({"GPT2_MAX_TIME": "90"}), "GPT2_MAX_TIME", "harmless", "90"),
    (setting({"COMPILE": "n"}), "COMPILE", "harmless", "not set"),
    (setting({"EVAL_SETS": '"news=n.txt"'}), "EVAL_SETS", "harmless", "news=n.txt"),
    (setting({"DATA_WORKERS": "3"}), "DATA_WORKERS", "harmless", "3"),
    (setting({"TENSORBOARD": "y"}), "TENSORBOARD", "harmless", "y"),
    (setting({"HELLASWAG_FILE": '""'}), "HELLASWAG_FILE", "harmless", '""'),
]  # fmt: skip


@pytest.mark.parametrize(("change", "subject", "status", "word"), ONE_THING)
def test_a_single_difference_is_named_and_nothing_else(
    first: Path, tmp_path: Path, change: Change, subject: str, status: str, word: str
) -> None:
    comparison = build.build_comparison([first, a_study(tmp_path / "two", change)])
    differing = [check for check in comparison.checks if check.status != "equal"]
    assert [(check.subject, check.status) for check in differing] == [(subject, status)]
    assert word in differing[0].values[1]
    assert word not in differing[0].values[0]
    assert bool(comparison.absolute) == (status == "harmless")
    assert [subject in reason for reason in comparison.reasons] == ([True] if status == "fatal" else [])
    assert subject in terminal(comparison)


def test_a_setting_that_a_hash_covers_as_well_is_named_once(first: Path, tmp_path: Path) -> None:
    def rate(value: dict[str, Any], config: Settings) -> None:
        config["LEARNING_RATE"] = '"1e-3"'
        value["fingerprint"]["schedule"] = "other"

    def size(value: dict[str, Any], config: Settings) -> None:
        config |= {"GPT2_MODEL_124M": "n", "GPT2_MODEL_MINI": "y"}
        value["fingerprint"]["model"] = "other"

    for name, change, subject in (("two", rate, "LEARNING_RATE"), ("three", size, "model")):
        comparison = build.build_comparison([first, a_study(tmp_path / name, change)])
        assert [reason.split(" ")[0] for reason in comparison.reasons] == [subject]


def test_every_row_of_the_checklist_is_tested_with_a_difference(first: Path, tmp_path: Path) -> None:
    comparison = build.build_comparison([first, a_study(tmp_path / "two")])
    assert {check.status for check in comparison.checks} == {"equal"}
    tried = {subject for _, subject, _, _ in ONE_THING} | {"variants", "seeds"}
    covered = {"environment variables", "CPU_THREADS", "HELLASWAG"}  # of the kinds tried
    assert {check.subject for check in comparison.checks} <= tried | covered


def test_settings_of_a_variant_that_one_study_lacks_are_harmless(first: Path, tmp_path: Path) -> None:
    change = setting({"ALTERNATION_INIT": '"0.1"'})
    comparison = build.build_comparison([first, a_study(tmp_path / "two", change, variants=("B", "RAALL"))])
    assert [check.status for check in comparison.checks if check.subject == "ALTERNATION_INIT"] == [
        "harmless"
    ]


def test_older_records_are_read_and_their_missing_parts_are_named(first: Path, tmp_path: Path) -> None:
    def older(value: dict[str, Any], config: Settings) -> None:
        del value["environment"]

    comparison = build.build_comparison([first, a_study(tmp_path / "two", older)])
    output = {check.subject for check in comparison.checks if check.status == "not recorded"}
    assert {"numpy", "python", "environment variables", "CUDA or ROCm"} <= output
    assert comparison.absolute  # same commit, no uncommitted changes: the code is known
    dirty = build.build_comparison(
        [first, a_study(tmp_path / "three", lambda v, c: (older(v, c), v.update(dirty=True))[0])]
    )
    assert dirty.reasons == ["not recorded, so agreement cannot be shown: code that computes"]


def loading(version: str, **changed: str) -> Change:
    """Records whose runs loaded the computing modules of a version, some of them changed."""
    modules = dict(equivalent_versions()[version])
    code = modules | {name.replace("__", "."): digest for name, digest in changed.items()}
    assert set(code) == set(modules)
    return recorded("environment", "code", to=code)


def code_checks(built: build.StudyComparison) -> dict[str, str]:
    """Return subject -> status of the rows on code, without those that are equal in every test here."""
    subjects = ("numbers", "commit", "uncommitted changes", "code that plans and reports")
    found = {check.subject: check.status for check in built.checks if check.group == "code"}
    assert {found.pop(subject) for subject in subjects} == {"equal"}
    return found


def test_records_with_former_module_names_compare_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checklist_rows, "NUMBER_CHANGES", {})
    old = a_study(tmp_path / "old", loading("reference"))
    new = a_study(tmp_path / "new", loading("present"))
    comparison = build.build_comparison([old, new])
    assert code_checks(comparison) == {"code that computes": "equal"}
    assert {"B", "RALEARN"} <= {row.variant for row in comparison.absolute}


def test_a_change_of_the_numbers_of_one_variant_excludes_only_that_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def study(name: str, code: Change, variants: tuple[str, ...] = VARIANTS) -> Path:
        return a_study(tmp_path / name, code, variants=variants)

    digests = {number: number * 16 for number in "123"}
    monkeypatch.setattr(equivalent_code, "former_digests", lambda: {"ra.attention": [*digests.values()]})
    monkeypatch.setattr(checklist_rows, "NUMBER_CHANGES", {"RALEARN": {"ra.attention": digests["2"]}})
    former = {number: loading("present", ra__attention=digest) for number, digest in digests.items()}
    before = [study("reference", loading("reference")), study("1", former["1"]), study("2", former["2"])]
    after = [study("3", former["3"]), study("present", loading("present"))]
    for same in (before, after):
        comparison = build.build_comparison(same)
        assert code_checks(comparison) == {"code that computes": "equal"}
        assert "RALEARN" in {row.variant for row in comparison.absolute}
    for one, other in itertools.product(before, after):
        comparison = build.build_comparison([one, other])
        assert code_checks(comparison) == {"code of RALEARN": "fatal", "code that computes": "equal"}
        assert {row.variant for row in comparison.absolute} == {
            "B",
            "RAEARLY",
            "RALATE",
            "RAALL",
            "control arms",
        }
        shown = " ".join(terminal(comparison).split())
        assert "RALEARN is excluded: ra.attention: the runs may compute something else" in shown
    alone = [study(f"{number} alone", former[number], ("RALEARN",)) for number in "23"]
    comparison = build.build_comparison(alone)
    assert code_checks(comparison) == {"code that computes": "fatal"}
    assert not comparison.absolute


def test_the_former_mix_of_ralearn_is_listed_as_a_change_of_its_numbers() -> None:
    """The versions up to the listed digest have the mix of the reference commit, later ones another."""
    changes = checklist_rows.NUMBER_CHANGES["RALEARN"]
    last, present = changes["ra.attention"], equivalent_versions()["present"]["ra.attention"]
    listed = [*former_digests().get("ra.attention", []), present]
    outdated = listed[: listed.index(last) + 1]
    for digest in [*outdated, equivalent_versions()["reference"]["ra.attention"]]:
        assert changed_code({"ra.attention": digest}, changes) == changes
        assert changed_code({"ra.attention": digest}) == {}
    for digest in listed[len(outdated) :]:
        assert changed_code({"ra.attention": digest}, changes) == {}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (loading("reference", gpt2__again="0" * 16), loading("present"), "gpt2.model.recompute"),
        (loading("reference"), loading("present", ra__attention="0" * 16), "ra.attention"),
    ],
)
def test_a_changed_computing_module_is_fatal_under_former_and_present_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: Change, new: Change, named: str
) -> None:
    monkeypatch.setattr(checklist_rows, "NUMBER_CHANGES", {})
    comparison = build.build_comparison([a_study(tmp_path / "old", old), a_study(tmp_path / "new", new)])
    fatal = [check for check in comparison.checks if check.status == "fatal"]
    assert [check.subject for check in fatal] == ["code that computes"]
    assert fatal[0].reason.startswith(f"{named}: ")
    assert not comparison.absolute


def test_other_hellaswag_items_are_reported_and_losses_are_still_compared(tmp_path: Path) -> None:
    def scored(name: str, **items: Any) -> Path:
        return a_study(tmp_path / name, recorded("hellaswag", to=SCORE | items))

    one = scored("one", items_sha256="a" * 64)
    for other, status in (
        (scored("same", items_sha256="a" * 64), "equal"),
        (scored("edited", items_sha256="b" * 64), "harmless"),
        (scored("fewer", items_sha256="a" * 64, items=400), "harmless"),
        (scored("older"), "not recorded"),
    ):
        comparison = build.build_comparison([one, other])
        (check,) = [check for check in comparison.checks if check.subject == "HellaSwag items"]
        assert (check.status, check.blocks) == (status, False)
        assert ("HellaSwag accuracies" in check.reason) == (status != "equal")
        assert comparison.absolute


def test_without_saved_settings_the_hash_of_the_schedule_decides(first: Path, tmp_path: Path) -> None:
    fixed = ("B", "RAALL")
    same, other = (a_study(tmp_path / name, change, variants=fixed) for name, change in (
        ("two", unchanged), ("three", recorded("fingerprint", "schedule", to="other"))))  # fmt: skip
    for folder in (same, other):
        for path in folder.glob("runs/*/config"):
            path.unlink()
    assert build.build_comparison([first, same]).absolute
    assert "the differing setting is unknown" in build.build_comparison([first, other]).reasons[0]
