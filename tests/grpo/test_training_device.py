"""The device of GRPO: the machine's accelerator, except Apple's, on which it was not tried."""

import pytest
import torch

from grpo.worker import training_device


@pytest.mark.parametrize(("present", "chosen"), [("mps", "cpu"), ("xpu", "xpu"), (None, "cpu")])
def test_grpo_trains_on_the_cpu_of_a_mac(
    monkeypatch: pytest.MonkeyPatch, present: str | None, chosen: str
) -> None:
    device = torch.device(present) if present else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert training_device() == chosen
