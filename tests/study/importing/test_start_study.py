"""A study of imported weights: equal starts, the measured differences, resume, changed files, arms without a start."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configuration import commands, rules
from gpt2.artifacts import checkpoint, run_record
from gpt2.config.batch import plan_batch
from gpt2.config.config import load_config
from gpt2.data.prefetch import BatchPrefetcher
from gpt2.interop.pretrained import PretrainedError
from gpt2.system.errors import UserError
from gpt2.system.signals import Interrupted
from gpt2.train.trainer import TrainingRun
from ra.settings import AlternationSettings
from ra.variants import variant
from scripts.record.replay import RunReplay
from study.export.model_card import model_card
from study.importing.start import check_weights, measured
from study.planning.past import PastStudy
from study.records import plan_file
from study.records.plan_file import Plan, PlanBudget
from study.records.runs import read_runs
from study.report.build import build_report
from study.report.method import method
from study.report.summary import context
from tests import small_runs
from tests.faults.in_process import train
from tests.faults.workplace import Workplace
from tests.imported_model import a_model, write_model

SMALL = AlternationSettings("output", 0.001, 100.0)
LINES = {
    "GPT2_MODEL_CUSTOM": "y", "GPT2_LAYERS": "2", "GPT2_HEADS": "2", "GPT2_WIDTH": "16", "TOKENIZER_BYTES": "y",
    "GPT2_MAX_ITERS": "4", "LEARNING_RATE": "1e-3",
}  # fmt: skip
ARMS = ("B", "RAALL", "RALEARN")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Workplace:
    """Return a finished study of B, RAALL and RALEARN from imported weights. Tests do not change it."""
    folder = tmp_path_factory.mktemp("study")
    weights = write_model(folder / "weights")
    place = Workplace(folder / "place", texts, VARIANTS=" ".join(ARMS), INIT_FROM=str(weights), **LINES)
    done = train(place)
    assert done.returncode == 0, done.stdout
    assert "comparing 3 arms with" in done.stdout
    return place


def test_the_model_card_names_the_weights_that_training_started_from(finished: Workplace) -> None:
    for name, rest in (("B", "its differences to the other control arms are rounding."), ("RALEARN", "")):
        run_dir = finished.run_dir(f"{name}0")
        record = run_record.load(run_dir)
        start = record.started_from
        assert start
        assert len(start.sha256) == 64
        card = to_plain_line(model_card(run_dir, record, [], "folder"))
        weights = f"the weights of {start.source} (SHA-256 {start.sha256})"
        assert f"Its training started from {weights}" in card
        assert f"The verdict holds for training from {weights}, not for training from random weights." in card
        assert rest in card
        assert ("is a control arm" in card) is (name == "B")


def test_a_lone_control_arm_differs_from_no_other(finished: Workplace, tmp_path: Path) -> None:
    place = copy(finished, tmp_path / "lone")
    shutil.rmtree(place.run_dir("RAALL0"))
    card = to_plain_line(model_card(place.run_dir("B0"), run_record.load(place.run_dir("B0")), [], "x"))
    assert "B is a control arm." in card
    assert "other control arms" not in card


def to_plain_line(markdown: str) -> str:
    """Return Markdown in one line without backslashes."""
    return " ".join(markdown.replace("\\", "").split())


def copy(place: Workplace, folder: Path) -> Workplace:
    shutil.copytree(place.folder, folder, symlinks=True)
    copied = object.__new__(Workplace)
    copied.folder, copied.texts = folder, place.texts
    return copied


def weights_of(place: Workplace) -> Path:
    record = run_record.load(place.run_dir())
    assert record.started_from
    return Path(record.started_from.source)


def losses(place: Workplace, name: str) -> list[float]:
    lines = [json.loads(line) for line in (place.run_dir(name) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def test_all_arms_start_as_the_imported_model_and_control_arms_coincide(finished: Workplace) -> None:
    base, swapped, learned = (losses(finished, f"{name}0") for name in ARMS)
    plan = plan_file.read(finished.study)
    assert plan
    assert plan.initial_weights
    assert len(base) == 4
    assert max(abs(a - b) for a, b in zip(base, swapped, strict=True)) < 1e-5
    assert base[0] != learned[0]
    assert abs(base[0] - learned[0]) < 0.01
    assert base[0] != pytest.approx(base[-1], abs=1e-3)  # it trains
    arms = plan.initial_weights.arms
    assert arms["B"].logits == 0
    assert arms["RAALL"].logits < 1e-6
    assert 1e-6 < arms["RALEARN"].logits < 2e-3
    assert abs(arms["RALEARN"].loss) <= arms["RALEARN"].token_loss < 0.01
    assert arms["RAALL"].token_loss < 1e-6
    record = run_record.load(finished.run_dir("RALEARN0"))
    assert record.started_from
    assert record.fingerprint
    assert record.fingerprint.initial_weights == record.started_from.sha256 == plan.initial_weights.sha256
    assert record.learned
    assert record.learned.alternation_probability[0] == pytest.approx(0.001, rel=0.6)
    assert not record.imported


def test_the_first_loss_is_that_of_the_imported_model(finished: Workplace) -> None:
    loaded = RunReplay(finished.run_dir(), run_record.load(finished.run_dir()), 1, from_start=True)
    ids = loaded.run.corpus.train.windows(loaded.run.window_numbers(0), 16)
    model = a_model()
    with torch.no_grad():
        logits = model(torch.as_tensor(ids)[:, :-1].long())
    targets = torch.as_tensor(ids)[:, 1:].long().flatten()
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets))
    assert losses(finished, "B0")[0] == pytest.approx(expected, abs=1e-5)


def test_the_steps_of_a_replay_are_the_recorded_ones(finished: Workplace) -> None:
    replay = RunReplay(finished.run_dir("RAALL0"), run_record.load(finished.run_dir("RAALL0")), 3)
    with replay.at_step():
        assert replay.checked == 2
    assert replay.start == 0
    assert replay.differences == []


def test_the_report_says_what_a_seed_means_and_takes_no_noise_from_equal_starts(finished: Workplace) -> None:
    report = build_report(finished.study)
    assert (report.floor, report.variance_check, report.odd_controls, report.sensitivities) == (
        None,
        None,
        [],
        [],
    )
    assert report.rounding is not None
    assert report.rounding < 1e-5
    said = " ".join(method(report))
    assert "A seed sets the order of the data" in said
    for name in ARMS:
        assert f"{name} " in said.partition("Before the first step")[2]
    first = " ".join(context(report))
    assert "B and RAALL are control arms. They start as one function" in first
    assert "A/A difference" not in first
    runs = tuple(run for run in read_runs(finished.study) if run.used)
    assert len(runs) == 3
    assert PastStudy(finished.study, runs, ()).control_noise() is None


def test_a_resumed_run_has_the_same_numbers_and_needs_no_file(finished: Workplace, tmp_path: Path) -> None:
    cut = copy(finished, tmp_path / "copy")
    for name in ARMS:
        shutil.rmtree(cut.run_dir(f"{name}0"))
    train_until(cut, 2)
    weights = weights_of(finished)
    moved = weights.rename(weights.with_name("moved"))
    try:
        done = train(cut)
    finally:
        moved.rename(weights)
    assert done.returncode == 0, done.stdout
    for name in ARMS:
        whole, resumed = (
            checkpoint.load_latest(place.run_dir(f"{name}0") / "checkpoint") for place in (finished, cut)
        )
        assert whole
        assert resumed
        assert whole.iteration == resumed.iteration == 4
        state = resumed.state["model"]
        assert all(torch.equal(value, state[key]) for key, value in whole.state["model"].items())
        assert losses(cut, f"{name}0") == losses(finished, f"{name}0")


def train_until(place: Workplace, iteration: int) -> None:
    """Interrupt every run of the study after some steps, with its checkpoint."""
    whole = TrainingRun.one_step

    def one_step(run: TrainingRun, feed: BatchPrefetcher) -> None:
        if run.iteration == iteration:
            raise Interrupted("the test")
        whole(run, feed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "one_step", one_step)
        train(place)
    assert [place.status(f"{name}0") for name in ARMS] == ["interrupted"] * 3


def test_changed_weights_are_refused_before_another_run(finished: Workplace, tmp_path: Path) -> None:
    changed = copy(finished, tmp_path / "copy")
    weights = write_model(tmp_path / "weights", a_model(seed=1))
    shutil.rmtree(changed.run_dir("RALEARN0"))
    config = changed.folder / ".config"
    source = str(weights_of(finished))
    for path in (config, changed.study / "config"):
        path.write_text(path.read_text().replace(source, str(weights)))
    done = train(changed)
    assert done.returncode != 0
    assert "have changed: SHA-256" in done.stdout
    assert not changed.run_dir("RALEARN0").exists()
    (changed.study / "plan.json").unlink()  # the records know them, too
    assert "have changed: SHA-256" in train(changed).stdout


def start(texts: Path, folder: Path, *arms: str, alternation: AlternationSettings = SMALL) -> Plan:
    """Measure the start of arms. The study has no run and no other plan."""
    config = replace(small_runs.configuration(texts, 4), init_from=str(write_model(folder / "weights")))
    variants = {name: variant(name, config.model, alternation) for name in arms}
    plan = Plan(batch=plan_batch(4, 2, 1, 16), budget=PlanBudget(0, 0, 4), variants={})
    (folder / "study").mkdir(exist_ok=True)
    plan = plan_file.read(folder / "study") or plan
    return measured(folder / "study", plan, check_weights(config, folder / "study"), config, variants)


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (
            "WINDOW",
            "WINDOW is another function than the imported model before its first step: logits differ by",
        ),
        ("QKNORM", r"no module of it has start_at_identity\(\)"),
        (
            "B+NORM=rms",
            r"B\+NORM=rms cannot hold the imported weights: blocks.0.norm1.bias of GPT-2 is missing",
        ),
        ("B+POSITION=rotary", "cannot hold the imported weights: position.weight of GPT-2 is missing"),
    ],
)
def test_an_arm_without_a_start_is_refused_by_name(
    arm: str, reason: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{reason}.*; fix: leave it out of CONFIG_VARIANTS"):
        start(texts, tmp_path, "B", arm)
    assert plan_file.read(tmp_path / "study") is None


def test_arms_that_are_added_later_are_compared_alone(texts: Path, tmp_path: Path) -> None:
    first = start(texts, tmp_path, "B", "RAALL").initial_weights
    second = start(texts, tmp_path, "B", "RAALL", "GATED").initial_weights
    assert first
    assert second
    assert [*second.arms] == ["B", "RAALL", "GATED"]
    assert {name: second.arms[name] for name in first.arms} == first.arms
    assert second.arms["GATED"].logits == 0
    assert (second.tokens, second.sha256) == (2 * 16, first.sha256)


def test_a_large_share_of_ralearn_is_refused(texts: Path, tmp_path: Path) -> None:
    half = AlternationSettings("output", 0.5, 100.0)
    with pytest.raises(
        UserError, match=r"RALEARN starts .* more than the equivalence margin of 0.01; fix: a sm"
    ):
        start(texts, tmp_path, "B", "RALEARN", alternation=half)


def test_another_shape_is_refused_with_the_lines_that_fit(finished: Workplace) -> None:
    config = replace(load_config(finished.run_dir() / "config"), init_from=str(weights_of(finished)))
    check_weights(config, finished.study)
    deeper = replace(config, model=replace(config.model, layers=3))
    with pytest.raises(
        PretrainedError, match=r"width 16, 24 positions and 257 tokens; .config has 3, .*GPT2_LAYERS=2"
    ):
        check_weights(deeper, finished.study)


@pytest.mark.parametrize(("mix", "share"), [("OUTPUT", "0.001"), ("SCORE", "0.001"), ("HARD", "0.4")])
def test_with_imported_weights_the_default_share_is_small(mix: str, share: str) -> None:
    tree, layers = rules.load_kconfig("cpu"), commands.read_layers("gpt2-ra-ablation")
    lines = [f"CONFIG_ALTERNATION_MIX_{mix}=y", "CONFIG_INIT_FROM=gpt2"]
    assert commands.configure(tree, layers, lines).text("ALTERNATION_INIT") == share
    assert commands.configure(tree, layers, lines[:1]).text("ALTERNATION_INIT") == "0.5"
