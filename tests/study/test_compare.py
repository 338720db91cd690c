import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gpt2 import record
from study import compare, compare_alignment, report
from study.compare_html import page
from study.compare_read import CompareError, labels, read_curve
from study.compare_render import alignment_table, markdown, terminal
from study.compare_words import error
from study.words import ONE_CLASS

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SCHEMA = json.loads((ROOT / "gpt2" / "run.schema.json").read_text())
VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
CONFIG = {
    "STUDY_NAME": '"one"', "VARIANTS": '"B RAEARLY RALATE RAALL RALEARN"', "SEEDS": "2",
    "GPT2_MODEL_124M": "y", "GPT2_MODEL_MINI": "n", "GPT2_BLOCK_SIZE": "64", "GPT2_DROPOUT": '"0.0"',
    "GPT2_MAX_TIME": "60", "EFFECTIVE_BATCH": "8", "MICRO_BATCH": "0", "COMPILE": "y", "CPU_THREADS": "0",
    "LEARNING_RATE": '"6e-4"', "MIN_LEARNING_RATE_RATIO": '"0.1"', "WARMUP_FRACTION": '"0.02"',
    "WEIGHT_DECAY": '"0.1"', "ADAM_BETA1": '"0.9"', "ADAM_BETA2": '"0.95"', "ADAM_EPSILON": '"1e-8"',
    "GRAD_CLIP": '"1.0"', "DATASET_EMBEDDED": "y", "DATA_WORKERS": "0", "HELLASWAG": "n", "EVAL_TOKENS": "4096",
    "ALTERNATION_MIX_OUTPUT": "y", "ALTERNATION_MIX_SCORE": "n", "ALTERNATION_INIT": '"0.5"',
}  # fmt: skip
SCORE = {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005, "items": 10042}
Settings = dict[str, str]
Change = Callable[[dict[str, Any], Settings], None]


def unchanged(value: dict[str, Any], config: Settings) -> None:
    """Every run as it is."""


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    hashes = dict.fromkeys(
        ("model", "data", "tokenizer", "batch", "schedule", "validation"), "0123456789abcdef"
    )
    return record.blank(record.run_name(name, seed), name, seed) | {
        "status": "finished", "commit": "c" * 40, "dirty": False, "config_sha256": "d" * 64,
        "fingerprint": hashes | {"initial_weights": f"{seed}23456789abcdef"},
        "target": {
            "name": "a100-40g", "device": "a card", "memory_bytes": 2**34, "dtype": "bfloat16",
            "attention_backend": "flash", "torch": "2.13.0", "driver": "550",
        },
        "environment": {
            "python": "3.11.9", "platform": "Linux x86_64", "numpy": "2.3.1", "cuda": "12.8", "rocm": None,
            "cudnn": "91002", "float32_matmul": "high", "threads": 8, "variables": {},
            "code": {"gpt2.step": "aaaa", "gpt2.optim": "bbbb", "ra.attention": "cccc", "study.plan": "dddd"},
        },
        "batch": {"effective": 8, "micro": 4, "accumulation": 2, "world_size": 1, "block_size": 64},
        "parameters": 1000,
        "progress": {"iterations": 100, "tokens": 51200, "train_seconds": 60.0},
        "validation": {
            "loss": loss, "perplexity": math.exp(loss), "best_perplexity": math.exp(loss), "tokens": 4096,
            "history": [[25600, 30.0, loss + 1], [51200, 60.0, loss]],
        },
        "schedule": {"iterations": 100, "cut": False},
    }  # fmt: skip


def put(folder: Path, value: dict[str, Any], config: Settings | None, curve: dict[int, float] | None) -> None:
    run_dir = folder / "runs" / value["run"]
    run_dir.mkdir(parents=True)
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    record.write_json(run_dir / "run.json", value)
    if config is not None:
        text = "".join(
            f"CONFIG_{n}={v}\n" if v != "n" else f"# CONFIG_{n} is not set\n" for n, v in config.items()
        )
        (run_dir / "config").write_text(text)
    lines = [{"event": "train", "iteration": k, "loss": loss} for k, loss in (curve or {}).items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def a_study(
    folder: Path,
    change: Change = unchanged,
    *,
    seeds: tuple[int, ...] = (0, 1),
    variants: tuple[str, ...] = VARIANTS,
    noise: int = 0,
    shift: float = 0.0,
    effect: float = -0.2,
) -> Path:
    """Seeds differ by 0.02 nats, arms by 0.005; `noise` draws the arms anew; all losses are moved by `shift`."""
    for seed in seeds:
        draw = np.random.default_rng([seed, noise])
        base = 4.0 + 0.02 * np.random.default_rng(seed).normal()
        for name in VARIANTS:
            loss = float(base + 0.005 * draw.normal() + (effect if name == "RALEARN" else 0.0) + shift)
            wander = np.cumsum(0.0005 * draw.normal(size=100))
            if name in variants:
                value, config = a_record(name, seed, loss), dict(CONFIG)
                curve = {k: float(4 + 7 / k + wander[k - 1]) for k in range(1, 101)}
                change(value, config)
                put(folder, value, config, curve)
    return folder


def recorded(*path: str, to: Any) -> Change:
    """A change of one place of every record."""

    def change(value: dict[str, Any], config: Settings) -> None:
        for key in path[:-1]:
            value = value[key]
        assert value.get(path[-1]) != to
        value[path[-1]] = to

    return change


def setting(to: Settings) -> Change:
    return lambda value, config: config.update(to)


def schedule(value: dict[str, Any], config: Settings) -> None:
    value["schedule"]["iterations"] = value["progress"]["iterations"] = 200


def own_schedule(value: dict[str, Any], config: Settings) -> None:
    if value["variant"] == "RALEARN":
        value["schedule"]["iterations"] = value["progress"]["iterations"] = 90


# One thing at a time: what is changed in the second study, the row that must say so, how, and a word of it.
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
    (recorded("commit", to="e" * 40), "commit", "harmless", "eeee"),
    (recorded("dirty", to=True), "uncommitted changes", "harmless", "yes"),
    (recorded("environment", "code", "gpt2.optim", to="eeee"), "code that computes", "fatal", "gpt2.optim eeee"),
    (recorded("environment", "code", "ra.new", to="eeee"), "code that computes", "fatal", "ra.new"),
    (recorded("environment", "code", "study.plan", to="eeee"), "code that plans and tells", "harmless", "plan eeee"),
    (recorded("environment", "variables", to={"NVIDIA_TF32_OVERRIDE": "0"}), "NVIDIA_TF32_OVERRIDE", "fatal", "0"),
    (recorded("environment", "variables", to={"MKL_CBWR": "AVX2"}), "MKL_CBWR", "harmless", "AVX2"),
    (recorded("fingerprint", "schedule", to="other"), "optimizer and budget, as hashed", "fatal", "other"),
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
    (setting({"DATA_WORKERS": "3"}), "DATA_WORKERS", "harmless", "3"),
    (setting({"HELLASWAG_FILE": '""'}), "HELLASWAG_FILE", "harmless", '""'),
]  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_study(tmp_path_factory.mktemp("studies") / "one")


@pytest.mark.parametrize(("change", "subject", "status", "word"), ONE_THING)
def test_one_thing_that_differs_is_caught_and_named_and_nothing_else_is(
    first: Path, tmp_path: Path, change: Change, subject: str, status: str, word: str
) -> None:
    made = compare.build([first, a_study(tmp_path / "two", change)])
    differing = [check for check in made.checks if check.status != "equal"]
    assert [(check.subject, check.status) for check in differing] == [(subject, status)]
    assert word in differing[0].values[1]
    assert word not in differing[0].values[0]
    assert bool(made.absolute) == (status == "harmless")
    assert [subject in reason for reason in made.reasons] == ([True] if status == "fatal" else [])
    assert subject in terminal(made)


def test_a_setting_that_a_hash_covers_as_well_is_named_once(first: Path, tmp_path: Path) -> None:
    def rate(value: dict[str, Any], config: Settings) -> None:
        config["LEARNING_RATE"] = '"1e-3"'
        value["fingerprint"]["schedule"] = "other"

    def size(value: dict[str, Any], config: Settings) -> None:
        config |= {"GPT2_MODEL_124M": "n", "GPT2_MODEL_MINI": "y"}
        value["fingerprint"]["model"] = "other"

    for name, change, subject in (("two", rate, "LEARNING_RATE"), ("three", size, "model")):
        made = compare.build([first, a_study(tmp_path / name, change)])
        assert [reason.split(" ")[0] for reason in made.reasons] == [subject]


def test_every_row_of_the_checklist_has_been_made_to_differ(first: Path, tmp_path: Path) -> None:
    made = compare.build([first, a_study(tmp_path / "two")])
    assert {check.status for check in made.checks} == {"equal"}
    tried = {subject for _, subject, _, _ in ONE_THING} | {"variants", "seeds"}
    covered = {"environment variables", "CPU_THREADS", "HELLASWAG"}  # of the kinds tried
    assert {check.subject for check in made.checks} <= tried | covered


def test_seeds_and_variants_are_compared_where_shared(first: Path, tmp_path: Path) -> None:
    other = a_study(tmp_path / "two", seeds=(1, 2), variants=("B", "RAALL"))
    made = compare.build([first, other])
    differing = {check.subject: check.status for check in made.checks if check.status != "equal"}
    assert differing == {"variants": "harmless", "seeds": "harmless"}
    assert [(row.variant, row.seeds) for row in made.absolute] == [
        ("B", [1]),
        ("RAALL", [1]),
        (compare.ARMS, [1]),
    ]
    apart = compare.build([first, a_study(tmp_path / "three", seeds=(5,))])
    assert [reason.split(" ")[0] for reason in apart.reasons] == ["seeds"]
    assert apart.absolute == []


def test_settings_of_a_variant_that_not_all_have_are_harmless(first: Path, tmp_path: Path) -> None:
    change = setting({"ALTERNATION_INIT": '"0.1"'})
    made = compare.build([first, a_study(tmp_path / "two", change, variants=("B", "RAALL"))])
    assert [check.status for check in made.checks if check.subject == "ALTERNATION_INIT"] == ["harmless"]


def test_older_records_are_read_and_what_they_lack_is_said(first: Path, tmp_path: Path) -> None:
    def older(value: dict[str, Any], config: Settings) -> None:
        del value["environment"]

    made = compare.build([first, a_study(tmp_path / "two", older)])
    said = {check.subject for check in made.checks if check.status == "not recorded"}
    assert {"numpy", "python", "environment variables", "CUDA or ROCm"} <= said
    assert made.absolute  # same commit, no uncommitted changes: the code is known
    dirty = compare.build(
        [first, a_study(tmp_path / "three", lambda v, c: (older(v, c), v.update(dirty=True))[0])]
    )
    assert dirty.reasons == ["not recorded, so that it cannot be shown to agree: code that computes"]


def test_hellaswag_on_other_items_is_said_and_forbids_no_comparison_of_losses(tmp_path: Path) -> None:
    def scored(name: str, **items: Any) -> Path:
        return a_study(tmp_path / name, recorded("hellaswag", to=SCORE | items))

    one = scored("one", items_sha256="a" * 64)
    for other, status in (
        (scored("same", items_sha256="a" * 64), "equal"),
        (scored("edited", items_sha256="b" * 64), "harmless"),
        (scored("fewer", items_sha256="a" * 64, items=400), "harmless"),
        (scored("older"), "not recorded"),
    ):
        made = compare.build([one, other])
        (check,) = [check for check in made.checks if check.subject == "HellaSwag items"]
        assert (check.status, check.blocks) == (status, False)
        assert ("HellaSwag accuracies" in check.reason) == (status != "equal")
        assert made.absolute


def test_without_saved_settings_the_hash_of_the_schedule_decides(first: Path, tmp_path: Path) -> None:
    fixed = ("B", "RAALL")
    same, other = (a_study(tmp_path / name, change, variants=fixed) for name, change in (
        ("two", unchanged), ("three", recorded("fingerprint", "schedule", to="other"))))  # fmt: skip
    for folder in (same, other):
        for path in folder.glob("runs/*/config"):
            path.unlink()
    assert compare.build([first, same]).absolute
    assert "cannot be said in what" in compare.build([first, other]).reasons[0]


def test_the_difference_at_equal_tokens_and_its_interval_are_scipys(first: Path, tmp_path: Path) -> None:
    other = a_study(tmp_path / "two", seeds=(0, 1, 2), noise=1, shift=0.1)
    row = next(row for row in compare.build([first, other]).absolute if row.variant == "RALEARN")
    values = [
        [json.loads((folder / "runs" / f"RALEARN{seed}" / "run.json").read_text())["validation"]["loss"]
         for seed in (0, 1)] for folder in (first, other)
    ]  # fmt: skip
    differences = np.subtract(values[1], values[0])
    low, high = stats.t.interval(0.95, 1, loc=differences.mean(), scale=stats.sem(differences))
    seen = row.differences[0]
    assert (row.tokens, row.seeds) == (51200, [0, 1])
    assert (seen.mean, seen.low, seen.high) == pytest.approx((differences.mean(), low, high))


def test_each_variant_is_compared_at_the_last_tokens_that_its_own_runs_share(
    first: Path, tmp_path: Path
) -> None:
    def shorter(value: dict[str, Any], config: Settings) -> None:
        if value["variant"] == "RAALL":
            value["validation"]["history"].pop()

    made = compare.build([first, a_study(tmp_path / "two", shorter)])
    tokens = {row.variant: row.tokens for row in made.absolute}
    assert tokens == {"B": 51200, "RAEARLY": 51200, "RALATE": 51200, "RAALL": 25600, "RALEARN": 51200,
                      compare.ARMS: 25600}  # fmt: skip


def published(folder: Path) -> list[Path]:
    """The published tables as records; what they do not tell is not recorded.

    The schema wants numbers for the split of the batch, the memory and the validation tokens: 1 and 0 stand in.
    """
    told = json.loads((FIXTURES / "published_2025.json").read_text())
    folders = []
    for label, study in told["studies"].items():
        for name, perplexity in study["perplexity"].items():
            value = record.blank(record.run_name(name, 0), name, 0)
            iterations, loss = study["iterations"], math.log(perplexity)
            tokens = iterations * study["effective_batch"] * told["block_size"]
            value |= {
                "status": "finished",
                "fingerprint": dict.fromkeys(SCHEMA["properties"]["fingerprint"]["properties"], "not recorded"),
                "target": {
                    "name": label.lower(), "device": study["device"], "memory_bytes": 0, "dtype": "not recorded",
                    "attention_backend": "not recorded", "torch": None, "driver": None,
                },
                "batch": {
                    "effective": study["effective_batch"], "micro": 1, "accumulation": study["effective_batch"],
                    "world_size": 1, "block_size": told["block_size"],
                },
                "progress": {"iterations": iterations, "tokens": tokens, "train_seconds": 7200.0},
                "validation": {
                    "loss": loss, "perplexity": perplexity, "best_perplexity": perplexity, "tokens": 0,
                    "history": [[tokens, 7200.0, loss]],
                },
                "schedule": {"iterations": told["planned_iterations"], "cut": True},
            }  # fmt: skip
            put(folder / label, value, None, None)
        folders.append(folder / label)
    return folders


def test_the_published_study_is_refused_for_its_batch_and_its_schedule(tmp_path: Path) -> None:
    made = compare.build(published(tmp_path))
    assert made.absolute == []
    fatal = {check.subject: check.values for check in made.checks if check.status == "fatal"}
    assert fatal == {
        "effective batch": ("512", "256"),
        "schedule": ("201 of 10,000 iterations", "601 of 10,000 iterations"),
    }
    for text in (markdown(made), terminal(made)):
        words = " ".join(text.split())
        assert "must not be compared with each other" in words
        assert "effective batch (512 " in words
        assert "schedule (201 of 10,000 iterations" in words


def test_the_published_gains_are_shown_against_their_own_baseline_as_no_evidence(tmp_path: Path) -> None:
    made = compare.build(published(tmp_path))
    text = markdown(made)
    assert ONE_CLASS in text
    assert text.count("the schedule was cut in 4 of 4 runs: ") == 2
    changes = {
        row.variant: [math.exp(i.mean) - 1 for i in row.against_baseline if i] for row in made.relative
    }
    assert changes["RALATE"] == pytest.approx([880.12 / 964.50 - 1, 316.04 / 335.94 - 1])
    assert text.count("one seed: not evidence") == 6
    assert [ranking.places for ranking in made.rankings] == [[], []]
    assert text.count("one seed: no ranking") >= 2
    assert "place seen" not in text


@pytest.mark.parametrize("name", ["A100", "W7900"])
def test_the_report_on_a_published_table_says_that_it_is_no_evidence_and_of_no_verdict(
    tmp_path: Path, name: str
) -> None:
    folder = next(folder for folder in published(tmp_path) if folder.name == name)
    made = report.write(folder)
    said = "one seed, equivalent arms, differences are not evidence"
    texts = [(folder / f"report.{kind}").read_text() for kind in ("md", "html")]
    for text in (*texts, report.render_terminal(made)):
        words = " ".join(text.split())
        assert words.count(said) == 1
        assert "a verdict is one on this seed alone" not in words
        assert "no ranking is given" not in words


def test_the_comparison_of_the_published_tables_says_of_each_that_it_is_no_evidence(tmp_path: Path) -> None:
    compare.write(compare.build(published(tmp_path)), tmp_path / "out")
    said = "one seed, equivalent arms, differences are not evidence"
    for kind, bold in (("md", "**{}**"), ("html", "<strong>{}</strong>")):
        text = (tmp_path / "out" / f"compare.{kind}").read_text()
        assert text.count(said) == 2
        assert all(f"{bold.format(name)}: {said}." in text for name in ("A100", "W7900"))
        assert "against its study's equivalent arms" not in text
        assert "than the equivalent arms" not in text


def test_equivalent_arms_share_their_places_and_a_real_change_keeps_its_own(
    first: Path, tmp_path: Path
) -> None:
    made = compare.build([first, a_study(tmp_path / "two", noise=3)])
    for ranking in made.rankings:
        places = {one.variant: (one.low, one.high) for one in ranking.places}
        assert places.pop("RALEARN") == (1, 1)
        assert set(places.values()) == {(2, 5)}
    assert "RALEARN** against its study's equivalent arms" in markdown(made)
    assert "they agree" in markdown(made)
    nothing = compare.build([first, a_study(tmp_path / "three", effect=0.0)])
    assert {(one.low, one.high) for one in nothing.rankings[1].places} == {(1, 5)}
    assert "no contradiction" in markdown(nothing)
    worse = compare.build([first, a_study(tmp_path / "four", effect=0.2)])
    assert "they contradict each other" in markdown(worse)


def curve(values: np.ndarray[Any, Any]) -> dict[int, float]:
    return {k: float(v) for k, v in enumerate(values, 1)}


def test_errors_are_numpys_and_the_curves_part_where_they_were_made_to() -> None:
    base = 3 + 7 / np.arange(1, 1001)
    other = base.copy()
    other[600:] *= 1.05
    difference = compare_alignment.relative(curve(base), curve(other))
    seen = compare_alignment.errors(difference)
    expected = np.abs(other - base) / base
    assert (seen.first, seen.early) == (0.0, 0.0)
    assert seen.late == pytest.approx(expected[-100:].mean())
    at = compare_alignment.parts_at(difference, compare_alignment.RULE)
    assert at == 601
    assert compare_alignment.parts_at(difference, 0.06) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=400))
def test_running_means_are_numpys(values: list[float]) -> None:
    width = min(len(values), max(5, len(values) // 50))
    expected = np.convolve(values, np.ones(width) / width, mode="valid")
    seen = compare_alignment.running(curve(np.array(values)))
    assert list(seen) == list(range(1, len(expected) + 1))
    assert list(seen.values()) == pytest.approx(expected, abs=1e-12)
    kept = compare_alignment.thinned(curve(np.array(values)))
    assert len(kept) <= compare_alignment.POINTS
    assert {1, len(values)} <= kept.keys()


def test_a_run_is_measured_by_one_percent_and_by_the_spread_of_equivalent_arms(
    first: Path, tmp_path: Path
) -> None:
    same = compare.build([first, a_study(tmp_path / "two")])
    assert len(same.alignments) == 10
    assert all(line.within_rule and line.within_envelope for line in same.alignments)
    assert all(line.errors.late == 0 and line.envelope and line.envelope.late > 0 for line in same.alignments)

    folder = a_study(tmp_path / "three")
    path = folder / "runs" / "B0" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[50:]:
        line["loss"] *= 1.2
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "train", "iter')
    made = compare.build([first, folder])
    line = next(line for line in made.alignments if line.run == "B0")
    assert not line.within_rule
    assert line.within_envelope is False
    assert [one.within_envelope for one in made.alignments if one.run != "B0"] == [True] * 9
    assert line.parts_from_rule == 51
    assert line.unreadable == 1
    assert sum(one.within_rule for one in made.alignments) == 9
    assert "1 unreadable lines" in markdown(made)


@pytest.mark.parametrize(("share", "within"), [(0.5, True), (1.5, False)])
def test_the_first_step_alone_is_held_against_the_equivalent_arms_first_step(
    first: Path, tmp_path: Path, share: float, within: bool
) -> None:
    folder = a_study(tmp_path / "two")
    envelope = compare.build([first, folder]).alignments[0].envelope
    assert envelope
    path = folder / "runs" / "RALEARN0" / "metrics.jsonl"  # no arm, so that the envelope stays as it is
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["loss"] *= 1 + share * envelope.first
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = compare.build([first, folder])
    line = next(line for line in made.alignments if line.run == "RALEARN0")
    assert line.envelope == envelope
    assert line.errors.first == pytest.approx(share * envelope.first)
    assert line.errors.early < envelope.early
    assert line.within_envelope is within
    assert sum(bool(one.within_envelope) for one in made.alignments) == 9 + within
    row = next(row for row in alignment_table(made.alignments)[1] if row[0] == "RALEARN0")
    shown = dict(zip(alignment_table(made.alignments)[0], row, strict=True))
    assert shown["A/A first step"] == error(envelope.first)
    assert shown["A/A last tenth"] == error(envelope.late)
    for text in (markdown(made), page(made)):
        assert "A/A first step" in text
        assert f"{9 + within} of 10 differ by no more than equivalent arms of one study do" in text
    assert "parts: A/A" in terminal(made)


def test_lines_that_are_no_training_losses_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "train", "iteration": 1, "loss": 4.0}\n{"event": "validation", "loss": 9.0}\n[]\nnull\n'
        '{"event": "train", "iteration": true, "loss": 4.0}\n{"event": "train", "iteration": 2, "loss": NaN}\n'
        '{"event": "train", "iteration": 1, "loss": 5.0}\n{"event": "train", "iteration": 3}\n"x"\n{'
    )
    seen = read_curve(tmp_path)
    assert seen.losses == {1: 5.0}
    assert seen.unreadable == 7
    assert read_curve(tmp_path / "absent").losses == {}


def test_runs_that_do_not_count_are_named_and_change_no_number(first: Path, tmp_path: Path) -> None:
    def spoil(value: dict[str, Any], config: Settings) -> None:
        if value["run"] == "B0":
            value |= {"status": "failed", "error": "NotFiniteError: loss | <b>nan</b>"}
            value["validation"]["loss"] = 99.0

    folder = a_study(tmp_path / "two", spoil)
    (folder / "runs" / "RAALL1" / "run.json").write_text("{")
    (folder / "runs" / "RALATE0" / "run.json").write_text('{"schema": 9}')
    made = compare.build([first, folder])
    rows = {row.variant: row.seeds for row in made.absolute}
    assert rows == {"B": [1], "RAEARLY": [0, 1], "RALATE": [1], "RAALL": [0], "RALEARN": [0, 1]}
    text = markdown(made)
    assert "3 of 10 runs are not counted: " in text
    assert "<b>" not in text
    assert "is of schema 9" in text
    assert max(row.losses[1].mean for row in made.absolute) < 5


def test_a_study_without_a_finished_run_is_said_and_nothing_is_compared(first: Path, tmp_path: Path) -> None:
    empty = tmp_path / "two"
    (empty / "runs").mkdir(parents=True)
    made = compare.build([first, empty])
    assert (made.absolute, made.relative, made.checks) == ([], [], [])
    assert "two has no finished run" in terminal(made)
    assert "There is nothing to compare" in markdown(made)


def test_three_studies_are_compared_with_the_first(first: Path, tmp_path: Path) -> None:
    made = compare.build([first, a_study(tmp_path / "two", noise=1), a_study(tmp_path / "three", noise=2)])
    assert {len(row.differences) for row in made.absolute} == {2}
    assert {line.studies for line in made.alignments} == {("one", "two"), ("one", "three")}


def test_what_cannot_be_compared_is_one_line_that_says_what_would_be_right(
    first: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for paths, told in (
        ([], "none was named"),
        ([first], "alone was named"),
        ([first, tmp_path / "nowhere"], "is no folder"),
        ([first, tmp_path / "empty"], "is no study"),
        ([first, first.parent / "." / first.name], "is named twice"),
    ):
        with pytest.raises(CompareError) as raised:
            compare.build(paths)
        assert told in str(raised.value)
        assert "right: " in str(raised.value)
        assert "\n" not in str(raised.value)


def test_studies_of_one_name_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    assert labels([tmp_path / "a" / "results" / "x", tmp_path / "b" / "results" / "x"]) == [
        "a/results/x",
        "b/results/x",
    ]
    assert labels([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]


def test_the_command_writes_its_files_and_reads_no_torch(first: Path, tmp_path: Path) -> None:
    other = a_study(tmp_path / "two", recorded("target", "device", to="<script>alert(1)</script>"))
    command = [
        sys.executable,
        "-m",
        "scripts.compare",
        str(first),
        str(other),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.split("\nwrote ")[0].splitlines())) <= 100
    assert "<script>" not in (tmp_path / "out" / "compare.md").read_text()
    seen = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert seen["absolute"][0]["differences"][0]["mean"] == 0
    html = (tmp_path / "out" / "compare.html").read_text()
    assert "<script>alert" not in html
    assert all(f'id="{name}"' in html for name in ("changes", "curves0"))
    again = subprocess.run(
        [*command[:4], str(other), "--out", str(other)], cwd=ROOT, capture_output=True, text=True
    )
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    code = "import sys, scripts.compare, study.compare_render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
