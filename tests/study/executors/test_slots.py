"""The shares of a machine: cards of one kind, or equally many cores."""

import dataclasses
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.resolved_target import ResolvedTarget, resolve
from runtime.settings import Config
from runtime.torch_devices import TorchDevice, TorchDevices
from study.executors.child_process import (
    Slot,
    card_slots,
    cores,
    cpu_slots,
    local_slots,
    runs_that_fit,
)
from tests.small_runs import configuration

CORES = [frozenset({core, core + 8}) for core in range(8)]
GIB = 2**30


@pytest.fixture
def cpu(tmp_path: Path) -> ResolvedTarget:
    config: Config = configuration(tmp_path, 1)
    return resolve(config.target)


@pytest.fixture
def card(cpu: ResolvedTarget) -> ResolvedTarget:
    return dataclasses.replace(cpu, device="cuda:0", device_name="NVIDIA A100", memory_bytes=40 * GIB)


def test_one_slot_is_the_whole_machine(cpu: ResolvedTarget) -> None:
    for wanted, threads, small in ((0, 0, False), (1, 0, False), (0, 1, False), (1, 1, True)):
        (slot,) = local_slots(wanted, cpu, threads, small=small)
        assert (slot.name, slot.environment, slot.cpus) == ("", {}, frozenset())


def test_runs_of_small_steps_take_the_cores_that_memory_allows(cpu: ResolvedTarget) -> None:
    """Too many runs at once swap, or wait for each other; one at a time leaves cores idle."""
    assert [runs_that_fit(threads, 8, 64 * GIB, small=True) for threads in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert [runs_that_fit(1, 8, gib * GIB, small=True) for gib in (0, 1, 5, 8)] == [1, 1, 5, 8]
    assert runs_that_fit(1, 8, 64 * GIB, small=False) == 1
    assert len(local_slots(0, cpu, 1, small=True)) == runs_that_fit(
        1, len(cores()), cpu.memory_bytes, small=True
    )


def test_a_run_of_several_ranks_has_the_whole_machine(cpu: ResolvedTarget) -> None:
    assert len(local_slots(0, cpu, 0, ranks=2)) == 1
    with pytest.raises(UserError, match=r"CONFIG_SLOTS=2 and CONFIG_RANKS=2.*fix: CONFIG_SLOTS=1"):
        local_slots(2, cpu, 0, ranks=2)


def test_slots_have_equally_many_cores_and_share_none() -> None:
    found = cpu_slots(3, 0, CORES)
    assert [len(slot.cpus) for slot in found] == [4, 4, 4]
    assert len(frozenset().union(*(slot.cpus for slot in found))) == 12


@pytest.mark.parametrize(("wanted", "threads", "fix"), [(9, 0, 8), (4, 3, 2)])
def test_more_threads_than_cores_are_refused(wanted: int, threads: int, fix: int) -> None:
    with pytest.raises(UserError, match=f"8 are available.*fix: CONFIG_SLOTS={fix}$"):
        cpu_slots(wanted, threads, CORES)


def devices(*gpus: tuple[str, int], kind: str = "cuda") -> TorchDevices:
    built = (TorchDevice(index, name, memory) for index, (name, memory) in enumerate(gpus))
    return TorchDevices(kind, "2.13", tuple(built))


A100 = ("NVIDIA A100", 40 * GIB)


def test_each_slot_has_a_card_of_its_own(card: ResolvedTarget) -> None:
    found = card_slots(0, card, devices(A100, A100), {})
    assert [slot.environment for slot in found] == [{"CUDA_VISIBLE_DEVICES": str(n)} for n in (0, 1)]
    found = card_slots(2, card, devices(A100, A100, kind="rocm"), {"CUDA_VISIBLE_DEVICES": "5, 7"})
    assert [slot.environment for slot in found] == [{"CUDA_VISIBLE_DEVICES": n} for n in ("5", "7")]
    found = card_slots(2, card, devices(A100, A100, kind="rocm"), {})
    assert [slot.environment for slot in found] == [{"HIP_VISIBLE_DEVICES": str(n)} for n in (0, 1)]


def test_cards_of_another_kind_are_not_used(card: ResolvedTarget) -> None:
    assert card_slots(0, card, devices(A100, ("NVIDIA T4", 16 * GIB)), {}) == [Slot("")]
    mixed = devices(A100, ("NVIDIA A100", 80 * GIB), A100, ("NVIDIA T4", 16 * GIB))
    assert [slot.name for slot in card_slots(0, card, mixed, {})] == ["card 0", "card 2"]
    with pytest.raises(UserError, match=r"has 2 x NVIDIA A100 \(not used: NVIDIA A100, NVIDIA T4.*SLOTS=2"):
        card_slots(3, card, mixed, {})
