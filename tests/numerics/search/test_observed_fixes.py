"""Monitor and recorder count each call of a fixed model once, as in the model without fixes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics.monitor.monitor import Monitor
from numerics.monitor.settings import MonitorConfig
from numerics.record.record_settings import RecorderConfig
from numerics.record.recorder import Recorder
from numerics.search.fix_words import fix

Rows = dict[tuple[str, str, str], dict[str, float]]
MICRO_BATCHES = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return found


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.proj(F.gelu(self.fc(x))))
        return found


class Net(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.attention, self.feed, self.recompute = Attention(), Feed(), recompute

    def block(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        found: Tensor = x + self.feed(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return found


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(3, 5, 8, generator=draw).requires_grad_() * 1, torch.randn(3, 5, 8, generator=draw)


def built(words: str, recompute: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net(recompute)
    if words:
        fix(net, words)
    return net


def monitored(folder: Path, words: str, recompute: bool) -> Rows:
    net = built(words, recompute)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = Monitor(net, optimizer, MonitorConfig(("all",), interval=1), folder)
    for step in (1, 2):
        with monitor.step(step):
            for _ in range(MICRO_BATCHES):
                x, weights = batch()
                (net(x) * weights).sum().backward()
            monitor.gradients("grad_reduced")
            with monitor.update():
                optimizer.step()
        optimizer.zero_grad()
    found: Rows = {}
    for file in sorted(folder.rglob("*.csv")):
        kind = file.name[: file.name.rindex("_")]
        with file.open() as lines:
            for row in csv.DictReader(lines):
                key = kind, row.pop("step"), row.pop("name")
                row.pop("vpp_stage")
                assert key not in found
                found[key] = {name: float(value) for name, value in row.items()}
    return found


WORDS = ["upcast:feed", "small:feed", "upcast:attention", "upcast:feed.gelu", "upcast:attention small:feed"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("words", WORDS)
def test_the_tables_of_a_fixed_model_are_those_without_fixes(
    tmp_path: Path, words: str, recompute: bool
) -> None:
    plain = monitored(tmp_path / "plain", "", recompute)
    fixed = monitored(tmp_path / "fixed", words, recompute)
    assert fixed.keys() == plain.keys()
    kinds = {kind for kind, _, _ in plain}
    assert kinds >= {"actv", "actv_grad", "attention", "grad_reduced", "param", "update_ratio"}
    assert ("actv_grad", "1", "feed.fc.output_grad.0") in plain
    for key, row in plain.items():
        if key[2] in converted(words):
            continue
        scale = max(abs(row.get("min", 1.0)), abs(row.get("max", 1.0)))
        zeros = (
            row.pop("zeros", 0.0),
            fixed[key].pop("zeros", 0.0),
        )  # the first query's gradient is 0 or rounding
        assert zeros[0] == pytest.approx(zeros[1], abs=0.06)
        assert fixed[key] == pytest.approx(row, rel=1e-4, abs=1e-5 * scale, nan_ok=True), key


def converted(words: str) -> set[str]:
    """Return the gradients of inputs that an up-cast module converts: of the copies, without the residual branch."""
    inner = {"upcast:feed": "feed.fc", "upcast:attention": "attention.qkv"}
    return {f"{inner[word]}.input_grad.0" for word in words.split() if word in inner}


def recorded(folder: Path, words: str, level: str) -> dict[str, Any]:
    net = built(words)
    recorder = Recorder(RecorderConfig(dump_path=folder, level=level, task="statistics"))  # type: ignore[arg-type]
    recorder.start(net)
    x, weights = batch()
    (net(x) * weights).sum().backward()
    recorder.stop()
    recorder.step()
    data: dict[str, Any] = json.loads((folder / "step0/rank0/dump.json").read_text())["data"]
    return data


@pytest.mark.parametrize("level", ["L0", "L1"])
@pytest.mark.parametrize("words", ["upcast:feed", "small:attention", "upcast:feed.gelu"])
def test_a_record_of_a_fixed_model_has_each_call_once(tmp_path: Path, words: str, level: str) -> None:
    plain, fixed = (recorded(tmp_path / name, given, level) for name, given in (("a", ""), ("b", words)))
    if level == "L1":
        linears = [name for name in plain if "linear" in name]
        assert linears == [name for name in fixed if "linear" in name]
        return
    assert fixed.keys() == plain.keys()
    for name, row in plain.items():
        for found, exact in zip(numbers(fixed[name]), numbers(row), strict=True):
            assert found == pytest.approx(exact, rel=1e-4, abs=1e-4)


def numbers(value: Any) -> list[float]:
    """Return the norms of a row, in order."""
    if isinstance(value, dict):
        mine = [float(value["Norm"])] if value.get("Norm") is not None else []
        return mine + [one for inner in value.values() for one in numbers(inner)]
    return [one for inner in value for one in numbers(inner)] if isinstance(value, list) else []
