"""The variables of a device and of a deterministic run are set before torch reads them."""

import os

import pytest

from runtime.resolved_target import export_environment


@pytest.mark.parametrize(
    ("name", "detected", "exported"),
    [("w7900", None, "1"), ("auto", "w7900", "1"), ("a100-40g", None, None), ("auto", "cpu", None)],
)
def test_a_configured_and_a_detected_card_have_the_same_environment(
    name: str, detected: str | None, exported: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    monkeypatch.setattr(os, "environ", {})
    export_environment(name, detected)
    assert os.environ.get(switch) == exported


@pytest.mark.parametrize("launched", [False, True])
def test_variables_of_a_launcher_are_removed_unless_it_started_the_process(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1"}
    monkeypatch.setattr(os, "environ", foreign | {"SLURM_CONF": "a"})
    export_environment("cpu", launched=launched)
    assert os.environ["SLURM_CONF"] == "a"
    assert (foreign.items() <= os.environ.items()) == launched
    assert bool(foreign.keys() & os.environ.keys()) == launched


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("h200", {}, "expandable_segments:True"),
        ("generic-cuda", {}, "expandable_segments:True"),
        ("w7900", {}, None),
        ("cpu", {}, None),
        ("h200", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("h200", {"PYTORCH_ALLOC_CONF": ""}, ""),
    ],
)
def test_the_allocator_of_nvidia_cards_has_segments_that_grow_unless_the_user_sets_it(
    name: str, before: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    export_environment(name)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == after
    assert before.items() <= os.environ.items()
