"""The GPUs of a machine are listed in a process that ends, and a training process selects its own."""

from types import SimpleNamespace

import pytest
import torch

from runtime import attention_kernels, resolve, torch_devices
from runtime.gpu_specs import GIB, TargetError
from runtime.settings import ANY_TARGET
from runtime.torch_devices import TorchDevice, TorchDevices

H200 = TorchDevices(
    "cuda", "2.13.0+cu130", (TorchDevice(0, "NVIDIA H200", 140 * GIB, False, (9, 0)),), "CUDA 13.0"
)


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
