"""Monitor and recorder count each call of a fixed model once, as in the model without fixes."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics.errors import NumericsError
from numerics.fixes.apply import fix
from numerics.monitor.monitor import Monitor, MonitorConfig
from numerics.record.record_settings import RecorderConfig
from numerics.record.recorder import WITHIN_FIX, Recorder

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


WORDS = [
    "upcast:feed", "small:feed", "small:attention", "upcast:attention", "upcast:feed.fc", "upcast:feed.gelu",
    "upcast:attention.scaled_dot_product_attention", "upcast:attention small:feed",
]  # fmt: skip


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


def test_the_gradient_of_a_converted_input_is_that_of_the_module_alone(tmp_path: Path) -> None:
    x, weights = batch()
    net = built("")
    torch.manual_seed(5)
    middle = (x + net.attention(x)).detach()
    copy = middle.clone().requires_grad_()
    ((middle + net.feed(copy)) * weights).sum().backward()
    fixed = built("upcast:feed")
    monitor = Monitor(fixed, None, MonitorConfig(("actv_grad",), interval=1), tmp_path)
    for step in (1, 2):  # the first also finds out the dtypes of results
        x, weights = batch()
        monitor.begin(step)
        with monitor.forward():
            torch.manual_seed(5)
            (fixed(x) * weights).sum().backward()
        found = dict(monitor.finish(write=False)["actv_grad"])
        assert copy.grad is not None
        assert found["feed.fc.input_grad.0"][0] == pytest.approx(float(copy.grad.norm()), rel=1e-5)


def recorded(folder: Path, words: str, level: str) -> tuple[dict[str, Any], dict[str, Any]]:
    net = built(words)
    recorder = Recorder(RecorderConfig(dump_path=folder, level=level, task="statistics"))  # type: ignore[arg-type]
    recorder.start(net)
    x, weights = batch()
    (net(x) * weights).sum().backward()
    recorder.stop()
    recorder.step()
    dump = json.loads((folder / "step0/rank0/dump.json").read_text())
    return dump["data"], dump


@pytest.mark.parametrize("words", ["upcast:feed", "small:feed", "upcast:feed.gelu"])
def test_a_record_of_a_fixed_model_has_each_call_once(tmp_path: Path, words: str) -> None:
    plain, _ = recorded(tmp_path / "plain", "", "L0")
    fixed, dump = recorded(tmp_path / "fixed", words, "L0")
    missing = plain.keys() - fixed.keys()
    assert fixed.keys() <= plain.keys()
    assert all("backward" in name and ".feed." in name for name in missing)
    assert missing
    assert dump["notes"] == [WITHIN_FIX]
    for name in fixed.keys() & plain.keys():
        for ours, exact in zip(numbers(fixed[name]), numbers(plain[name]), strict=True):
            assert ours == pytest.approx(exact, rel=1e-4, abs=1e-4)


def numbers(value: Any) -> list[float]:
    """Return the norms of a row, in order."""
    if isinstance(value, dict):
        mine = [float(value["Norm"])] if value.get("Norm") is not None else []
        return mine + [one for inner in value.values() for one in numbers(inner)]
    return [one for inner in value for one in numbers(inner)] if isinstance(value, list) else []


def test_a_record_of_functions_has_no_discarded_call(tmp_path: Path) -> None:
    names = {
        words: [
            name for name in recorded(tmp_path / (words or "plain"), words, "L1")[0] if "gelu" in name.lower()
        ]
        for words in ("", "upcast:feed.gelu", "upcast:feed")
    }
    forward = {words: [name for name in found if "forward" in name] for words, found in names.items()}
    assert {words: len(found) for words, found in forward.items()} == {
        "": 1,
        "upcast:feed.gelu": 1,
        "upcast:feed": 1,
    }
    assert math.isfinite(len(names[""]))


@pytest.mark.parametrize("word", ["small:*", "small:attention", "upcast:linear", "upcast:softmax"])
def test_functions_within_multihead_attention_are_fixed(word: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    model, weights = nn.Sequential(layer), word.endswith("softmax")
    x = torch.randn(2, 5, 8)

    def gradient() -> Tensor:
        layer.zero_grad()
        layer(x, x, x, need_weights=weights)[0].square().sum().backward()
        assert layer.in_proj_weight.grad is not None
        return layer.in_proj_weight.grad.clone()

    plain = gradient()
    kind, _, function = word.partition(":")
    with fix(model, f"{kind}:0" if function == "*" else f"{kind}:0.{function}") as fixes:
        fixed = gradient()
        fixes.require_used()
    assert not torch.equal(fixed, plain)
    torch.testing.assert_close(fixed, plain)
    assert torch.equal(gradient(), plain)
    with fix(model, "small:0.gelu") as fixes:
        gradient()
        with pytest.raises(NumericsError, match=r"0 did not call gelu"):
            fixes.require_used()
