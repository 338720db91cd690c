"""The micro-batch from predicted memory: the largest that fits, of total memory alone, the same for all variants."""

import dataclasses
from typing import Any

import pytest

from gpt2 import cpu_linear
from gpt2.measured_memory import measure
from gpt2.predicted_memory import Prediction, StepWorkload, predict
from gpt2.transformer import ModelParts
from gpt2.validation import EVALUATION_TOKENS
from ra.arms import published_variants
from ra.variants import Variant, variant
from runtime.batch_plan import micro_batches
from runtime.resolved_target import TARGETS, ResolvedTarget
from runtime.settings import AlternationSettings, Config, ModelConfig
from study.planning.micro_batch import MARGIN, MemoryPlanError, Predictions, require_free

MIB = 2**20
MODEL = ModelConfig("test", 2, 2, 64, 64, 0.0, vocabulary=500, padded_vocabulary=512)
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
NAMES = ("B", "RAEARLY", "RAALL", "RALEARN")
VARIANTS = [variant(name, MODEL, ALTERNATION) for name in NAMES]


PREDICTED: dict[tuple[Any, ...], Prediction] = {}  # of this file's evaluation


@pytest.fixture
def config(a100_config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A study on an A100 whose evaluation is a quarter of the real one, so that predictions take half the time."""
    monkeypatch.setitem(EVALUATION_TOKENS, "card", EVALUATION_TOKENS["card"] // 4)
    monkeypatch.setattr("study.planning.micro_batch._PREDICTIONS", PREDICTED)
    return dataclasses.replace(a100_config, model=MODEL)


def with_batch(config: Config, effective: int) -> Config:
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, effective=effective))


def on(config: Config, mib: int, kind: str = "a100-40g") -> Predictions:
    row = TARGETS[kind]
    return Predictions(
        config, ResolvedTarget(row, "cuda:0", "a card", mib * MIB, "bfloat16", "flash", None, None)
    )


def highest_peak(predictions: Predictions, micro: int) -> int:
    return max(predictions.peak_bytes(each, micro) for each in VARIANTS)


@pytest.mark.parametrize("mib", [170, 400])
def test_the_largest_divisor_at_which_every_variant_fits_is_chosen(config: Config, mib: int) -> None:
    predictions = on(config, mib)
    batch = predictions.choose_batch(VARIANTS)
    room = mib * MIB * (1 - MARGIN)
    assert highest_peak(predictions, batch.micro) <= room
    larger = [n for n in micro_batches(512, 1) if batch.micro < n <= 1024]
    assert all(highest_peak(predictions, n) > room for n in larger[:1])
    assert batch.micro * batch.accumulation == 512


def test_on_a_cpu_the_runs_at_once_and_the_ranks_of_each_share_the_memory(config: Config) -> None:
    """A card belongs to one rank; the memory of a CPU to all processes."""
    cpu = ResolvedTarget(TARGETS["cpu"], "cpu", "a CPU", 140 * MIB, "float32", "math", None, None)
    config = with_batch(config, 128)
    ranks = dataclasses.replace(config, target=dataclasses.replace(config.target, ranks=2))
    planned = Predictions(ranks, cpu, 2)
    room = int(35 * MIB * (1 - MARGIN))
    assert on(ranks, 35).usable_bytes == planned.usable_bytes == room
    assert Predictions(config, cpu).usable_bytes == int(140 * MIB * (1 - MARGIN))
    (baseline,) = VARIANTS[:1]
    micro = planned.choose_batch([baseline]).micro
    assert planned.peak_bytes(baseline, micro) <= room < planned.peak_bytes(baseline, 2 * micro)
    assert micro < Predictions(ranks, cpu).choose_batch([baseline]).micro
    small = dataclasses.replace(cpu, memory_bytes=4 * MIB)
    with pytest.raises(
        MemoryPlanError, match=r"has 0\.0 GiB for 4 processes, .* fewer CONFIG_RANKS or CONFIG_SLOTS"
    ):
        Predictions(ranks, small, 2).choose_batch([baseline])


def test_the_largest_micro_batch_fits_and_one_more_does_not(config: Config) -> None:
    predictions = on(with_batch(config, 256), 140)
    micro = predictions.largest_micro(VARIANTS[3])
    assert 64 < micro < 256
    assert predictions.fits(VARIANTS[3], micro)
    assert not predictions.fits(VARIANTS[3], micro + 1)
    assert on(config, 1).largest_micro(VARIANTS[0]) == 0


def test_a_failed_prediction_is_reported_and_the_plan_continues(config: Config) -> None:
    def broken(layer: int) -> None:
        raise RuntimeError("needs a real tensor\nsecond line")

    predictions = on(config, 400)
    custom = Variant("OWN", ModelParts(attention=broken), "OWN", MODEL)  # type: ignore[arg-type]
    assert predictions.choose_batch([VARIANTS[0], custom]).effective == 512
    reason = predictions.unpredictable(custom, 4)
    assert reason == "the memory of OWN cannot be predicted (RuntimeError: needs a real tensor)"


def test_too_little_free_memory_is_refused_in_one_line(config: Config) -> None:
    resolved = on(config, 40960).resolved
    require_free(resolved, 10 * 2**30, 11 * 2**30)
    require_free(resolved, None, 0)
    require_free(resolved, 10 * 2**30, None)
    with pytest.raises(
        MemoryPlanError, match=r"a card: 3.0 of 40.0 GiB are free, .* needs 10.0 GiB: another"
    ) as caught:
        require_free(resolved, 10 * 2**30, 3 * 2**30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("micro", "vocabulary", "width", "accumulation", "name"),
    [
        (2, 4000, 32, 1, "RALEARN"),
        (2, 4000, 32, 2, "RALEARN, recomputed"),
        (8, 500, 64, 2, "RALEARN"),
        (9, 600, cpu_linear.MIN_WIDTH, 2, "RALEARN"),
    ],
)
def test_on_a_cpu_the_prediction_of_every_phase_equals_the_allocated_bytes(
    config: Config, name: str, accumulation: int, micro: int, vocabulary: int, width: int
) -> None:
    """Backward's peak is at its end with few tokens and many words, and at its beginning with many tokens."""
    model = dataclasses.replace(MODEL, width=width, vocabulary=vocabulary, padded_vocabulary=vocabulary + 12)
    settings = dataclasses.replace(ALTERNATION, recompute="recomputed" in name)
    attention = variant(name.split(",")[0], model, settings).parts
    work = StepWorkload(model, config.optimizer, attention, micro, accumulation, "cpu", "float32")
    assert predict(work).timeline.by_phase() == measure(work, "cpu").allocated


PARTS = "B+NORM=rms+MLP=swiglu+POSITION=rotary"  # of the arms RMS, SWIGLU and ROTARY
ATTENTIONS = [name for name in published_variants() if name not in ("RMS", "SWIGLU", "ROTARY")]


@pytest.mark.parametrize("name", [PARTS, "RALEARN+POSITION=rotary", *ATTENTIONS])
def test_on_a_cpu_the_prediction_of_every_arm_is_near_the_allocated_bytes(config: Config, name: str) -> None:
    """Kernels of small vectors and scalars allocate a few bytes that no tensor has."""
    model = dataclasses.replace(MODEL, width=64, vocabulary=500, padded_vocabulary=512)
    parts = variant(name, model, ALTERNATION).parts
    work = StepWorkload(model, config.optimizer, parts, 4, 2, "cpu", "float32")
    assert predict(work).timeline.by_phase() == pytest.approx(measure(work, "cpu").allocated, rel=2e-3)
