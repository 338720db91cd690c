"""Judge a GRPO study from its records: verdicts by an independent t test, diverged runs in no mean, damage left out."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from scipy import stats

from grpo import records
from grpo.grpo_settings import GrpoSettings, run_name
from grpo.gsm8k import standard_error
from grpo.records import AccuracyEvaluation, GrpoRecord
from referee.verdict.looks import FIRST_SHARE
from runtime.settings import TrackingConfig
from study.analysis.verdict import judge
from study.grpo_page import GrpoReport, build_report

PROBLEMS = 1000
SETTINGS = GrpoSettings(
    name="study", results_dir=Path(), seeds=3, arms=("baseline", "mild", "qerl", "strong"), model="m", train_file="a",
    test_file="b", epochs=2, max_steps=0, prompts=128, group=8, micro_batch=16, response_tokens=512,
    learning_rate=1e-6, evaluate_steps=20, evaluate_limit=0, evaluate_batch=128, checkpoint_steps=10, margin=1.0,
    cpu_threads=0, tracking=TrackingConfig(False, "off", ""),
)  # fmt: skip


def write_run(
    settings: GrpoSettings, arm: str, seed: int, right: list[int], diverged: str = "", weights: str = "w"
) -> Path:
    """Write a run whose evaluations at steps 0, 20, ... have so many right answers."""
    run_dir = settings.run_dir(arm, seed)
    run_dir.mkdir(parents=True)
    (run_dir / records.CONFIG).write_text("")
    lines = [
        {"event": "train", "iteration": step, "loss": 0.0, "grad_norm": 1.0, "reward": 0.5, "logp_diff": 0.02 * seed,
         "logp_diff_absolute": 0.03, "logp_diff_over": 0.02 * seed > 0.01}
        for step in (1, 2)
    ]  # fmt: skip
    (run_dir / records.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = []
    for number, count in enumerate(right):
        rows = [
            records.Response(p, "7", "7" if p < count else "8", float(p < count)) for p in range(PROBLEMS)
        ]
        records.write_responses(run_dir, f"test-{20 * number:05}", rows)
        share = count / PROBLEMS
        evaluations.append(AccuracyEvaluation(20 * number, share, standard_error(share, PROBLEMS), PROBLEMS))
    steps = 20 * (len(right) - 1)
    records.write(
        run_dir,
        GrpoRecord(
            run=run_name(arm, seed), arm=arm, seed=seed, status="diverged" if diverged else "finished",
            error=diverged or None, identity="id", model="m", initial_weights=weights, steps=116 if diverged else steps,
            step=steps, noisy_norms=4, seconds=1.0, environment={"device": "cpu", "trl": "1.16.0"},
            evaluations=tuple(evaluations), responses=PROBLEMS * len(evaluations),
        ),
    )  # fmt: skip
    return run_dir


FINAL = {"baseline": (760, 764, 770), "mild": (761, 764, 771), "qerl": (700, 712, 708)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = dataclasses.replace(SETTINGS, results_dir=tmp_path_factory.mktemp("results"))
    for arm, finals in FINAL.items():
        for seed, right in enumerate(finals):
            write_run(found, arm, seed, [240, right])
    write_run(found, "strong", 0, [240, 900])
    write_run(found, "strong", 1, [240], diverged="step 7: the loss is nan")
    return found.results_dir


@pytest.fixture
def settings(tmp_path: Path, written: Path) -> GrpoSettings:
    """Return the settings of a copy of the study."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return dataclasses.replace(SETTINGS, results_dir=tmp_path)


def build(settings: GrpoSettings) -> GrpoReport:
    return build_report(settings, "id")


def test_verdicts_are_those_of_a_paired_t_test_with_holms_method(settings: GrpoSettings) -> None:
    report = build(settings)
    mild, qerl = report.arm("mild"), report.arm("qerl")
    assert mild.verdict
    assert qerl.verdict
    reference = stats.ttest_rel([70.0, 71.2, 70.8], [76.0, 76.4, 77.0])
    assert qerl.verdict.test.p_value == pytest.approx(reference.pvalue)
    assert qerl.verdict.adjusted_p == pytest.approx(
        2 * reference.pvalue / FIRST_SHARE
    )  # two arms, first look
    assert qerl.verdict.test.difference.mean == pytest.approx(-(70.0 + 71.2 + 70.8 - 76.0 - 76.4 - 77.0) / 3)
    assert (mild.word, qerl.word) == ("equivalent", "worse")
    assert report.arm("baseline").accuracy == pytest.approx((0.760 + 0.764 + 0.770) / 3)


def test_a_diverged_run_is_counted_and_in_no_mean_and_its_arm_is_not_judged(settings: GrpoSettings) -> None:
    strong = build(settings).arm("strong")
    assert strong.word == "diverged"
    assert strong.verdict is None
    assert strong.diverged == {1: "step 7: the loss is nan"}
    assert strong.final == {0: 0.9}
    assert strong.missing == [2]
    assert [(point.step, point.accuracy, point.seeds) for point in strong.trajectory] == [
        (0, 0.24, 1),
        (20, 0.9, 1),
    ]


def test_a_difference_during_training_is_of_the_seeds_that_both_arms_have(settings: GrpoSettings) -> None:
    """strong has seed 0 alone, whose baseline has 76.0 %; the baseline's mean over its seeds is 76.47 %."""
    report = build(settings)
    assert report.arm("strong").trajectory[1].minus(report.arm("baseline").trajectory[1]) == pytest.approx(
        0.14
    )


def test_a_baseline_that_diverged_at_a_seed_leaves_no_verdict_to_its_arms(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, results_dir=tmp_path, arms=("baseline", "qerl"))
    for seed in range(3):
        write_run(settings, "qerl", seed, [240, 700 + seed])
        write_run(
            settings, "baseline", seed, [240, 760], diverged="step 3: the loss is nan" if seed == 2 else ""
        )
    report = build(settings)
    assert report.arm("baseline").word == "diverged"
    assert report.arm("qerl").verdict is None


def test_fewer_than_three_seeds_have_no_answer_and_missing_runs_make_it_interim(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, results_dir=tmp_path, arms=("baseline", "qerl"))
    for seed in range(2):
        for arm, right in (("baseline", 760), ("qerl", 600)):
            write_run(settings, arm, seed, [240, right + seed])
    assert build(dataclasses.replace(settings, seeds=2)).arm("qerl").word == "cannot tell"
    assert build(settings).arm("qerl").word == "interim"


def test_more_seeds_are_another_look_and_the_first_margin_holds(settings: GrpoSettings) -> None:
    assert build(settings).arm("qerl").word == "worse"
    more = dataclasses.replace(settings, seeds=5, margin=9.0)
    assert build(more).margin == 1.0
    for seed in (3, 4):
        for arm, right in (("baseline", 760), ("mild", 760), ("qerl", 705)):
            write_run(more, arm, seed, [240, right + seed])
    verdict = build(more).arm("qerl").verdict
    assert verdict
    assert (verdict.word, verdict.looks) == ("worse", (3, 5))
    table = {
        "B": dict(enumerate((24.0, 23.6, 23.0, 23.7, 23.6))),
        "x": dict(enumerate((30.0, 28.8, 29.2, 29.2, 29.1))),
    }
    (once,) = judge(table, looks={"x": (3, 5)})
    assert verdict.test.p_value == pytest.approx(once.test.p_value)
    assert verdict.level == pytest.approx(once.level)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("metrics", "metrics.jsonl: SHA-256 is"),
        ("response", "responses/test-00020.jsonl.gz: SHA-256 is"),
        ("record", "was altered"),
        ("weights", "began with other weights than baseline0"),
    ],
)
def test_a_run_that_does_not_agree_with_its_record_is_left_out(
    settings: GrpoSettings, damage: str, says: str
) -> None:
    run_dir = settings.run_dir("qerl", 2)
    path = run_dir / "responses/test-00020.jsonl.gz"
    if damage == "metrics":
        (run_dir / records.METRICS).write_text("")
    elif damage == "response":
        rows = records.read_responses(path)
        records.write_responses(
            run_dir, "test-00020", [dataclasses.replace(rows[0], response="9"), *rows[1:]]
        )
    elif damage == "record":
        text = (run_dir / records.RECORD).read_text()
        (run_dir / records.RECORD).write_text(text.replace("0.708", "0.908"))
    else:
        record = records.read(run_dir)
        assert record
        records.write(run_dir, record.replace(initial_weights="others"))
    report = build(settings)
    assert len(report.problems) == 1
    assert says in report.problems[0]
    assert sorted(report.arm("qerl").final) == [0, 1]
