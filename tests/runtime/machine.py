"""A fake machine for detection: trees for /sys and /proc, and answers of tools."""

from collections.abc import Sequence
from pathlib import Path

from runtime.detected_hardware import Hardware, detect_hardware
from runtime.gpu_specs import GIB


class Machine:
    """A fake machine with 64 GiB of memory; an empty one has no tools and no cards."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.answers: dict[str, str | Exception] = {}
        self.put(self.proc / "meminfo", "MemTotal: 67108864 kB")
        self.put(self.proc / "cpuinfo", "model name\t: AMD Ryzen 9 7950X")
        self.put(self.proc / "sys/kernel/osrelease", "6.8.0")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def nvidia(self, *lines: str, listing: str = "") -> None:
        self.answers = {"--query": "\n".join(lines) + "\n", "-L": listing}

    def amd(self, node: int, device: int, target: int, gib: float, simds: int, cpu_cores: int = 0) -> None:
        """Write one node of the compute topology in the kernel's format."""
        folder = self.sys / f"class/kfd/kfd/topology/nodes/{node}"
        values = {
            "cpu_cores_count": cpu_cores,
            "simd_count": simds,
            "gfx_target_version": target,
            "vendor_id": 4098,
            "device_id": device,
            "drm_render_minor": 127 + node,
            "unique_id": 0xABC0 + node,
        }
        self.put(folder / "properties", "\n".join(f"{key} {value}" for key, value in values.items()))
        bank = f"heap_type 1\nsize_in_bytes {int(gib * GIB)}\nflags 0"
        self.put(folder / "mem_banks/0/properties", bank)
        self.put(folder / "mem_banks/1/properties", f"heap_type 0\nsize_in_bytes {64 * GIB}")  # the host's

    def cpu_node(self) -> None:
        folder = self.sys / "class/kfd/kfd/topology/nodes/0"
        self.put(folder / "properties", "cpu_cores_count 32\nsimd_count 0\nvendor_id 0\ngfx_target_version 0")
        self.put(folder / "mem_banks/0/properties", f"heap_type 0\nsize_in_bytes {64 * GIB}")

    def workstation(self) -> None:
        """A Radeon PRO W7900 in a machine with the integrated graphics of a Ryzen."""
        self.cpu_node()
        self.amd(1, 0x7448, 110000, 47.98, 192)
        self.amd(2, 0x164E, 100306, 0.5, 4)

    def run(self, command: Sequence[str]) -> str:
        for mark, answer in self.answers.items():
            if any(word.startswith(mark) for word in command):
                if isinstance(answer, Exception):
                    raise answer
                return answer
        raise FileNotFoundError(command[0])

    def detect(self, **environment: str) -> Hardware:
        return detect_hardware(self.sys, self.proc, self.run, environment)
