"""Recording leaves the numbers of a step alone, and what it records is what torch's own hooks and autograd see."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from referee.numerics import NumericsError, PrecisionDebugger, Recorder, RecorderConfig

IDS = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))


def gpt2() -> GPT2:
    model = GPT2(layers=2, heads=2, width=16, block_size=16, vocabulary=97, padded_vocabulary=128)
    initialise(model, 0)
    return model


def backward(model: GPT2) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    return loss.detach(), {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }


def recorded(folder: Path, **settings: Any) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **settings))
    model = gpt2()
    recorder.start(model)
    loss, gradients = backward(model)
    recorder.stop()
    recorder.step()
    content = json.loads((folder / "step0/rank0/dump.json").read_text())
    return content["data"], loss, gradients


@pytest.mark.parametrize(
    ("level", "task", "summary"), itertools.product(("L0", "L1", "mix"), ("statistics", "tensor"), ("md5",))
)
def test_recording_changes_no_bit_of_the_step(level: str, task: str, summary: str, tmp_path: Path) -> None:
    loss, gradients = backward(gpt2())
    _, loss_recorded, recorded_gradients = recorded(tmp_path, level=level, task=task, summary_mode=summary)
    assert torch.equal(loss, loss_recorded)
    assert gradients.keys() == recorded_gradients.keys()
    assert all(torch.equal(gradients[name], recorded_gradients[name]) for name in gradients)


class Branching(nn.Module):
    """Use an input twice, return two outputs, view one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x) * scale + x
        first, second = y.split(2, -1)
        first = first.clone()
        first += 1  # in place
        return first, second.relu()


def test_gradients_of_a_module_are_those_of_torchs_full_backward_hooks(tmp_path: Path) -> None:
    """All values are multiples of 2^-k, so no sum rounds: torch's hooks change the order of a gradient's sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    branching = Branching()
    for parameter in (*model.parameters(), *branching.parameters()):
        parameter.data = torch.randint(-4, 5, parameter.shape) / 4
    expected: dict[str, tuple[Any, Any]] = {}

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        expected[type(module).__name__] = (grad_input, grad_output)

    whole = nn.ModuleList([model, branching])

    def step() -> None:
        x = (torch.arange(-6.0, 6).reshape(3, 4) / 4).requires_grad_()
        hidden = model(x)
        first, second = branching(hidden, torch.full((4,), 0.5, requires_grad=True))
        (first.sum() * 3 + second.square().sum() + hidden.sum()).backward()

    handles = [branching.register_full_backward_hook(hook), model[1].register_full_backward_hook(hook)]
    step()
    for handle in handles:
        handle.remove()
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), task="tensor"))
    recorder.start(whole)
    step()
    recorder.stop()
    recorder.step()
    folder = tmp_path / "step0/rank0/dump_tensor_data"
    for name, label in (("Branching", "Module.1.Branching"), ("ReLU", "Module.0.1.ReLU")):
        grad_input, grad_output = expected[name]
        for side, gradients in (("input", grad_output), ("output", grad_input)):
            for index, gradient in enumerate(gradients):
                found = torch.load(folder / f"{label}.backward.0.{side}.{index}.pt", weights_only=True)
                torch.testing.assert_close(found, gradient, rtol=0, atol=0)


def test_uninitialised_memory_is_not_recorded(tmp_path: Path) -> None:
    data, _, _ = recorded(tmp_path, level="L1")
    assert data
    assert not any("empty" in name for name in data)
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path / "other"), level="L1"))
    recorder.start()
    buffer = torch.empty(4)
    buffer[:2].copy_(torch.ones(2))
    recorder.stop()
    recorder.step()
    rows = json.loads((tmp_path / "other/step0/rank0/dump.json").read_text())["data"]
    assert list(rows) == ["Torch.ones.0.forward", "Tensor.copy_.0.forward"]  # the view of the buffer is none
    assert rows["Tensor.copy_.0.forward"]["input_args"][0]["Max"] is None
    assert rows["Tensor.copy_.0.forward"]["output"][0]["Max"] == 1


def test_a_compiled_model_is_recorded_as_written(tmp_path: Path) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="eager")
    model(torch.ones(1, 4))
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path)))
    recorder.start(model)
    model(torch.ones(1, 4)).sum().backward()
    recorder.stop()
    recorder.step()
    content = json.loads((tmp_path / "step0/rank0/dump.json").read_text())
    assert "Module.1.GELU.forward.0" in content["data"]
    assert "compile" in content["incomplete"][0]


def test_the_debugger_reads_the_guides_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "task": "statistics",
                "dump_path": str(tmp_path / "dump"),
                "rank": [],
                "step": [0, 2, 3],
                "level": "mix",
                "enable_dataloader": False,
                "statistics": {"scope": [], "list": [], "data_mode": ["forward"], "summary_mode": "md5"},
            }
        )
    )
    other = PrecisionDebugger(config, task="tensor", dump_path=tmp_path / "other", level="L0", step=[1])
    assert other.recorder.config == RecorderConfig(str(tmp_path / "other"), "tensor", "L0", (1,))
    debugger = PrecisionDebugger(config_path=config)
    assert debugger.recorder.config.step == (0, 2, 3)
    model = gpt2()
    debugger.start(model=model)
    backward(model)
    debugger.stop()
    debugger.step()
    data = json.loads((tmp_path / "dump/step0/rank0/dump.json").read_text())["data"]
    assert not any("backward" in name for name in data)
    assert len(data["Functional.layer_norm.0.forward"]["output"][0]["md5"]) == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"level": "L9"}', 'level is "L9"; fix: use L0, L1, mix'),
        ('{"step": ["0-99999999999"]}', "step is ['0-99999999999']"),
        ('{"tensor": {"scope": ["a", "b"]}, "task": "tensor"}', "scope is not supported"),
        ('{"statistics": {"data_mode": ["sideways"]}}', "data_mode is ['sideways']"),
    ],
)
def test_a_faulty_configuration_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NumericsError) as caught:
        PrecisionDebugger(config_path=tmp_path / "config.json")
    assert message in str(caught.value)
    assert "fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
