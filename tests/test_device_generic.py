"""Code that means "the device" does not say cuda; torch.accelerator and torch.get_device_module(device) name any."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "gpt2", "referee", "ra", "grpo", "runtime", "scripts", "study")
# file -> lines that mean CUDA or an NVIDIA or AMD card, and why
ALLOWED = {
    "gpt2/platforms.py": (1, "TF32 is a number format of NVIDIA cards"),
    "bench/card_kernels.py": (1, "on CUDA and ROCm one kernel supports float32"),
    "bench/card_studies.py": (3, "contexts on a GPU are CUDA's"),
    "runtime/provenance.py": (1, "the version of CUDA"),
    "runtime/run_record.py": (1, "the version of CUDA"),
    "gpt2/validation.py": (3, "cuDNN's attention"),
    "runtime/attention_kernels.py": (3, "the order of CUDA's kernels, and TF32"),
    "runtime/gpu_specs.py": (10, "a kind of hardware, and torch's device type of two kinds"),
    "runtime/resolved_target.py": (5, "a kind of hardware"),
    "runtime/detected_hardware.py": (4, "a kind of hardware"),
    "runtime/torch_devices.py": (5, "the build of torch, and its module for NVIDIA and AMD cards"),
    "gpt2/predicted_memory.py": (2, "a kind of hardware"),
    "runtime/ranks.py": (1, "torch's device type and its backend"),
    "gpt2/measured_memory.py": (1, "a comment names both modules"),
    "referee/numerics/setup/config_checker.py": (3, "the version of CUDA, and switches of cuBLAS and cuDNN"),
    "ra/global_state.py": (4, "settings of kernels and of autocast on a GPU"),
    "referee/numerics/seed.py": (1, "cuBLAS reads a variable when CUDA starts"),
    "scripts/dev/setup.py": (3, "the build of torch for a kind of card"),
    "gpt2/replay.py": (1, "the version of CUDA"),
    "study/compare/study_checklist.py": (1, "the version of CUDA"),
    "study/executors/child_process.py": (1, "a kind of hardware"),
    "study/planning/micro_batch.py": (1, "a kind of hardware"),
    "study/report/method.py": (1, "the version of CUDA"),
}
FIX = "fix: torch.accelerator or torch.get_device_module(device); a line that means CUDA is listed in ALLOWED"


def said() -> dict[str, list[str]]:
    """Return file -> its lines that say cuda, as "number: text"."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search("cuda", line):
                    found.setdefault(path.relative_to(ROOT).as_posix(), []).append(
                        f"{number}: {line.strip()}"
                    )
    return found


def test_no_line_says_cuda_where_it_means_the_device() -> None:
    lines = said()
    unknown = {name: text for name, text in lines.items() if len(text) > ALLOWED.get(name, (0, ""))[0]}
    assert not unknown, f"{unknown}; {FIX}"


def test_the_list_of_allowed_lines_has_no_entry_that_is_not_needed() -> None:
    lines = said()
    assert {name: count for name, (count, _) in ALLOWED.items()} == {
        name: len(lines.get(name, [])) for name in ALLOWED
    }
