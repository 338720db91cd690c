"""Speed of `make card` on a GPU, from given samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.card import speed
from bench.card.checks import CardCheck, CheckedDevice
from bench.workers import BenchError
from gpt2.hardware.gpu_specs import TARGETS
from gpt2.hardware.resolve import ResolvedTarget

H200 = ResolvedTarget(
    TARGETS["h200"], "cuda:0", "NVIDIA H200", 150_000_000_000, "bfloat16", "cudnn", None, "2.13.0", None
)
B, PLAIN, DEFAULT, RALEARN = ("B", 64), ("plain", 64), ("plain", 12), ("RALEARN", 64)


def sample(tokens_per_second: float, gib: float) -> dict[str, Any]:
    seconds = 192 * 1024 / tokens_per_second
    return {
        "tokens_per_second": tokens_per_second,
        "step_seconds": seconds,
        "peak_bytes": int(gib * 2**30),
        "flops_per_token": 1e9,
    }


def lines(monkeypatch: pytest.MonkeyPatch, micro: int = 64, **changes: Any) -> dict[str, CardCheck]:
    """Check these samples. changes: of B, plain, RALEARN."""
    speeds = {
        "B": sample(495_000, 20),
        "plain": sample(380_000, 45),
        "RALEARN": sample(450_000, 21),
    } | changes

    def measure(shape: Any, case: str, micro: int, seconds: float) -> Any:
        if isinstance(speeds[case], Exception) and (case != "plain" or micro != 12):
            raise speeds[case]
        return speeds[case] if not isinstance(speeds[case], Exception) else sample(380_000, 8)

    @contextmanager
    def open_workers(persistent: bool) -> Iterator[Any]:
        yield measure

    monkeypatch.setattr(speed, "open_workers", open_workers)
    monkeypatch.setattr(speed, "planned_micro", lambda card, shape: micro)
    return {check.name: check for check in speed.speed_checks(CheckedDevice(H200, Path("none")))}


def test_goals_and_estimate_that_are_reached_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch)
    assert len(found) == 9
    assert {line.verdict for line in found.values()} == {"pass"}
    assert (
        found["speed: B, 124m-t1024, micro-batch 64"].measured
        == "495,000 tokens/s, MFU 0.500, peak 20.00 GiB"
    )
    assert found["goal: MFU of B"].measured == "0.500"
    assert found["goal: speed of B to plain at micro-batch 12"].measured == "1.303"


def test_each_missed_goal_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, B=sample(440_000, 23), RALEARN=sample(390_000, 24), plain=sample(400_000, 45))
    differ = {name for name, line in found.items() if line.verdict == "differs"}
    assert differ == {name for name in found if name.startswith("goal: ")} | {
        "speed: B, 124m-t1024, micro-batch 64"
    }


def test_the_estimate_is_for_micro_batch_64(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, micro=32, B=sample(300_000, 10))
    assert found["speed: B, 124m-t1024, micro-batch 32"].verdict == "pass"


def test_a_plain_step_that_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(
        monkeypatch, plain=BenchError("plain at micro-batch 64: torch.OutOfMemoryError: CUDA out of memory")
    )
    verdicts = {name: line.verdict for name, line in found.items()}
    assert verdicts["speed: plain, 124m-t1024, micro-batch 64"] == "not run"
    assert verdicts["goal: speed of B to plain at equal micro-batch"] == "not run"
    assert verdicts["goal: speed of B to plain at micro-batch 12"] == "pass"


def test_a_baseline_that_fails_differs_and_its_goals_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {
        name: line.verdict for name, line in lines(monkeypatch, B=BenchError("out of memory")).items()
    }
    assert verdicts.pop("speed: B, 124m-t1024, micro-batch 64") == "differs"
    assert {verdict for name, verdict in verdicts.items() if name.startswith("goal")} == {"not run"}
