from pathlib import Path
from typing import Any

import pytest

from runtime import run_record
from study.compare import compared_studies as build
from tests.study.compared import (
    SCORE,
    VARIANTS,
    Change,
    Settings,
    a_study,
    recorded,
    setting,
    terminal,
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
    (recorded("choice", to=SCORE | {"items_sha256": "b"}), "continuation choice items", "harmless", "SHA-256 b"),
    (recorded("fingerprint", "model", to="other"), "model", "fatal", "other"),
    (recorded("parameters", to=1001), "parameters", "fatal", "1,001"),
    (recorded("fingerprint", "initial_weights", to="other"), "initial weights", "fatal", "other"),
    (recorded("batch", "effective", to=16), "effective batch", "fatal", "16"),
    (recorded("batch", "block_size", to=128), "sequence length", "fatal", "128"),
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
    (recorded("environment", "triton", to="3.4.0"), "triton", "harmless", "3.4.0"),
    (recorded("environment", "numpy", to="2.0.0"), "numpy", "harmless", "2.0.0"),
    (recorded("environment", "python", to="3.12.1"), "python", "harmless", "3.12.1"),
    (recorded("fingerprint", "numbers", to=2), "numbers", "fatal", "2"),
    (recorded("commit", to="e" * 40), "commit", "harmless", "eeee"),
    (recorded("dirty", to=True), "uncommitted changes", "harmless", "yes"),
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
    (setting({"SCHEDULE_COSINE": "n", "SCHEDULE_WSD": "y"}), "SCHEDULE", "fatal", "wsd"),
    (setting({"GPT2_MAX_TIME": "90"}), "GPT2_MAX_TIME", "harmless", "90"),
    (setting({"COMPILE": "n"}), "COMPILE", "harmless", "not set"),
    (setting({"EVAL_SETS": '"news=n.txt"'}), "EVAL_SETS", "harmless", "news=n.txt"),
    (setting({"DATA_WORKERS": "3"}), "DATA_WORKERS", "harmless", "3"),
    (setting({"TENSORBOARD": "y"}), "TENSORBOARD", "harmless", "y"),
    (setting({"HELLASWAG_FILE": '""'}), "HELLASWAG_FILE", "harmless", '""'),
]  # fmt: skip


Case = tuple[Change, str, str, str]


def batches() -> list[list[Case]]:
    """Cases of one grade and of different rows. The hash is alone: a differing setting explains it."""
    found: dict[tuple[str, int], list[Case]] = {}
    for case in ONE_THING:
        _, subject, status, _ = case
        place = 9 if "hash" in subject else 0
        while any(other == subject for _, other, _, _ in found.get((status, place), [])):
            place += 1
        found.setdefault((status, place), []).append(case)
    return list(found.values())


@pytest.mark.parametrize("cases", batches())
def test_each_difference_is_named_and_nothing_else(first: Path, tmp_path: Path, cases: list[Case]) -> None:
    def change(value: dict[str, Any], config: Settings) -> None:
        for one, _, _, _ in cases:
            one(value, config)

    comparison = build.build_comparison([first, a_study(tmp_path / "two", change)])
    differing = {check.subject: check for check in comparison.checks if check.status != "equal"}
    assert {name: row.status for name, row in differing.items()} == {
        name: level for _, name, level, _ in cases
    }
    for _, subject, status, word in cases:
        values = differing[subject].values
        assert (word in values[1], word in values[0]) == (True, False)
        assert any(subject in reason for reason in comparison.reasons) == (status == "fatal")
        assert subject in terminal(comparison)
    assert bool(comparison.absolute) == (cases[0][2] == "harmless")


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
    covered = {"CPU_THREADS", "HELLASWAG"}  # of the kinds tried
    assert {check.subject for check in comparison.checks} <= tried | covered


def test_settings_of_a_variant_that_one_study_lacks_are_harmless(first: Path, tmp_path: Path) -> None:
    change = setting({"ALTERNATION_INIT": '"0.1"'})
    comparison = build.build_comparison([first, a_study(tmp_path / "two", change, variants=("B", "RAALL"))])
    assert [check.status for check in comparison.checks if check.subject == "ALTERNATION_INIT"] == [
        "harmless"
    ]


def custom(digest: str) -> Change:
    def change(value: dict[str, Any], config: Settings) -> None:
        if value["variant"] == "RALEARN":
            value["environment"]["code"] = {"ra.custom.mine": digest}

    return change


def test_another_source_of_a_custom_variant_excludes_that_variant_alone(tmp_path: Path) -> None:
    def comparison(name: str, variants: tuple[str, ...]) -> build.StudyComparison:
        studies = [a_study(tmp_path / name / digest, custom(digest), variants=variants) for digest in "12"]
        return build.build_comparison(studies)

    same = build.build_comparison([a_study(tmp_path / name, custom("1")) for name in ("one", "two")])
    assert {check.status for check in same.checks} == {"equal"}
    mixed = comparison("mixed", VARIANTS)
    differing = {check.subject: check.status for check in mixed.checks if check.status != "equal"}
    assert differing == {"source of RALEARN": "fatal"}
    assert {row.variant for row in mixed.absolute} == {*VARIANTS, "control arms"} - {"RALEARN"}
    assert "RALEARN is excluded" in " ".join(terminal(mixed).split())
    alone = comparison("alone", ("RALEARN",))
    assert not alone.absolute
    assert "source of RALEARN" in alone.reasons[0]


def test_other_hellaswag_items_are_reported_and_losses_are_still_compared(tmp_path: Path) -> None:
    def scored(name: str, **items: Any) -> Path:
        return a_study(tmp_path / name, recorded("hellaswag", to=SCORE | items))

    one = scored("one", items_sha256="a" * 64)
    for other, status in (
        (scored("same", items_sha256="a" * 64), "equal"),
        (scored("edited", items_sha256="b" * 64), "harmless"),
        (scored("fewer", items_sha256="a" * 64, items=400), "harmless"),
    ):
        comparison = build.build_comparison([one, other])
        (check,) = [check for check in comparison.checks if check.subject == "HellaSwag items"]
        assert (check.status, check.blocks) == (status, False)
        assert ("HellaSwag accuracies" in check.reason) == (status != "equal")
        assert comparison.absolute


def test_without_saved_settings_agreement_cannot_be_shown(first: Path, tmp_path: Path) -> None:
    folder = a_study(tmp_path / "two", variants=("B", "RAALL"))
    for path in folder.glob("runs/*/config"):
        path.unlink()
        run_record.write(path.parent, run_record.load(path.parent))
    comparison = build.build_comparison([first, folder])
    assert not comparison.absolute
    assert [reason.partition(" (")[0] for reason in comparison.reasons] == ["saved settings"]
