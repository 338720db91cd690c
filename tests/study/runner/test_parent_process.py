"""The process of a study opens no context on a GPU: it lists, predicts and reports without one."""

import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.temporary_studies import configure_study
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import attention_kernels, resolve, torch_devices
from gpt2.hardware.gpu_specs import GIB, TargetError
from gpt2.hardware.torch_devices import TorchDevice, TorchDevices
from scripts import report
from study.memory import peaks
from tests.shared_folder import data_folder

H200 = TorchDevices(
    "cuda", "2.13.0+cu130", (TorchDevice(0, "NVIDIA H200", 140 * GIB, False, (9, 0)),), "CUDA 13.0"
)
# What a process may ask: torch documents that these open no context.
HARMLESS = {
    "is_available": True,
    "device_count": 1,
    "is_initialized": False,
    "is_current_stream_capturing": False,
    "_is_compiled": False,
}
SMALL = {
    "VARIANTS": "B",
    "SEEDS": "1",
    "GPT2_MAX_TIME": "0",
    "GPT2_MAX_ITERS": "3",
    "GPT2_BLOCK_SIZE": "16",
    "EFFECTIVE_BATCH": "2",
    "EVAL_TOKENS": "64",
    "DATASET_EMBEDDED": "y",
    "DATASET_MAX_TOKENS": "20000",
    "HELLASWAG": "n",
}


def refuse(name: str) -> Callable[..., Any]:
    def function(*arguments: object, **settings: object) -> Any:
        raise AssertionError(f"torch.cuda.{name} was called in the process of the study")

    return function


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch with CUDA and an H200, on which every other function of torch.cuda raises."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__.startswith("torch.cuda") and not name.startswith(
                ("manual_seed", "_lazy_call")
            ):
                answer = HARMLESS.get(name)
                monkeypatch.setattr(
                    module, name, refuse(name) if answer is None else lambda answer=answer: answer
                )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answer = SimpleNamespace(returncode=0, stdout=json.dumps(torch_devices.to_plain(H200)))
    run = subprocess.run

    def answer_as_child(command: list[str], **settings: Any) -> Any:
        return answer if command[-1] == torch_devices.__name__ else run(command, **settings)

    monkeypatch.setattr(torch_devices, "subprocess", SimpleNamespace(run=answer_as_child))


@pytest.mark.usefixtures("gpu")
def test_a_study_its_report_and_its_memory_open_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="get_device_properties"):
        torch_devices.list_torch_devices()  # the fake is effective
    study = configure_study(tmp_path, "gpt2-ra-ablation-smoke", **SMALL, **data_folder())
    assert study.run() == 0  # its training processes find the CPU of this machine
    assert study.resolved.device_name == "NVIDIA H200"
    monkeypatch.setattr("sys.argv", ["report", str(study.directory)])
    assert report.main() == 0
    monkeypatch.setattr(peaks, "_measure_in_process", lambda name, micro: None)
    peaks.report_memory(study.symbols, ["B"], ["B", "RALEARN"], tmp_path / "memory", planning=False)
    assert "NVIDIA H200" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_a_training_process_lists_the_gpus_itself_and_selects_one(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(attention_kernels, "list_torch_devices", lambda: H200)
    monkeypatch.setattr(attention_kernels, "check_attention", lambda resolved, *sizes: resolved)
    model = SimpleNamespace(heads=2, width=32, block_size=16, dropout=0.0)
    assert attention_kernels.prepare_device(ANY_TARGET, model).device == "cuda:0"  # type: ignore[arg-type]
    assert selected == ["cuda:0"]


def test_a_child_lists_what_this_process_would_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    listed = torch_devices.list_in_child()  # of the installed build
    monkeypatch.undo()
    assert listed == torch_devices.list_torch_devices()


def test_a_child_that_fails_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TargetError, match="cannot list the GPUs: exit status 1; fix: check the driver"):
        resolve.resolve(ANY_TARGET)
