"""The GPUs of a machine are listed in a process that ends, and a training process selects its own."""

import pytest
import torch

from runtime import resolved_target, torch_devices
from runtime.gpu_specs import TargetError
from runtime.settings import ANY_TARGET


def test_a_child_lists_what_this_process_would_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    listed = torch_devices.list_in_child()  # of the installed build
    monkeypatch.undo()
    assert listed == torch_devices.list_torch_devices()


def test_a_child_that_fails_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TargetError, match="cannot list the GPUs: exit status 1; fix: check the driver"):
        resolved_target.resolve(ANY_TARGET)
