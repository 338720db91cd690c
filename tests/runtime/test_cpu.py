"""Test the cores and memory available to a process, from fake /sys and /proc trees."""

from pathlib import Path

import pytest

from runtime.detected_hardware import cpu_threads, memory_bytes

GIB = 2**30


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Eight logical CPUs on four cores, 64 GiB."""
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    core = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    put(sys, {core.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    put(proc, {"meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB", "self/cgroup": "0::/"})
    put(proc, {"cpuinfo": "processor : 0\nmodel name\t: AMD Ryzen 9 7950X 16-Core Processor"})
    return sys, proc


def test_hyper_threads_count_once(roots: tuple[Path, Path]) -> None:
    assert cpu_threads(0, *roots, allowed=set(range(8))) == 4


def test_only_cores_of_the_affinity_mask_count(roots: tuple[Path, Path]) -> None:
    assert cpu_threads(0, *roots, allowed={0, 4}) == 1
    assert cpu_threads(0, *roots, allowed={0, 1, 5}) == 2


@pytest.mark.parametrize(("quota", "threads"), [("250000", 2), ("50000", 1), ("900000", 4), ("max", 4)])
def test_a_containers_cpu_quota_is_an_upper_bound(roots: tuple[Path, Path], quota: str, threads: int) -> None:
    put(roots[0], {"fs/cgroup/cpu.max": f"{quota} 100000"})
    assert cpu_threads(0, *roots, allowed=set(range(8))) == threads


def test_a_quota_of_an_enclosing_cgroup_counts(roots: tuple[Path, Path]) -> None:
    put(roots[1], {"self/cgroup": "0::/user.slice/job"})
    put(
        roots[0],
        {"fs/cgroup/user.slice/cpu.max": "200000 100000", "fs/cgroup/user.slice/job/cpu.max": "max 100000"},
    )
    assert cpu_threads(0, *roots, allowed=set(range(8))) == 2


def test_version_1_cgroups_are_read(roots: tuple[Path, Path]) -> None:
    put(roots[1], {"self/cgroup": "4:memory:/jobs/a\n2:cpu,cpuacct:/jobs/a"})
    cpu, memory = "fs/cgroup/cpu,cpuacct/jobs", "fs/cgroup/memory"
    put(roots[0], {f"{cpu}/cpu.cfs_quota_us": "300000", f"{cpu}/cpu.cfs_period_us": "100000"})
    put(roots[0], {f"{cpu}/a/cpu.cfs_quota_us": "-1", f"{cpu}/a/cpu.cfs_period_us": "100000"})
    put(roots[0], {f"{memory}/memory.limit_in_bytes": "9223372036854771712"})
    put(roots[0], {f"{memory}/jobs/a/memory.limit_in_bytes": str(8 * GIB)})
    assert cpu_threads(0, *roots, allowed=set(range(8))) == 3
    assert memory_bytes(*roots) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 64 * GIB), (str(2 * GIB), 2 * GIB), (str(512 * GIB), 64 * GIB)]
)
def test_memory_is_the_smaller_of_machine_and_container(
    roots: tuple[Path, Path], limit: str, expected: int
) -> None:
    put(roots[0], {"fs/cgroup/memory.max": limit})
    assert memory_bytes(*roots) == expected
