"""A device that flips bits is found and named with its pattern; sound devices are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics.__main__ import main
from numerics.errors import NumericsError
from numerics.repeat import corruption
from numerics.stress.devices import parse_fault
from numerics.stress.kernels import kernels
from numerics.stress.patterns import PATTERNS
from numerics.stress.report import as_json, compare_machines, stress_document, write_stress
from numerics.stress.run import ALONE, ELECTION, START, TOGETHER, Stress, StressOutcome
from numerics.stress.station import Flip, Station
from numerics.stress.vote import elect
from numerics.stress.worker import DeviceLostError, ThreadWorker
from pages.document import render_terminal

ROOT = Path(__file__).parents[3]
MEMORY = 1 << 14
NAMES = ["matrix product 64 float32", "attention 64 float32", "transposed copy 64", "memory: walking ones"]


class Rounds:
    """Ends a stress after a number of questions, so that no test depends on the clock."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def stressed(faults: Sequence[Flip | None], turns: int = 40, names: Sequence[str] = NAMES) -> StressOutcome:
    workers = [
        ThreadWorker(f"device {number}", Station("cpu", MEMORY, fault)) for number, fault in enumerate(faults)
    ]
    try:
        return Stress(workers, names, 3600.0, None, Rounds(len(names) + turns), 5).run()
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("bit", [3, 26])
def test_the_flipping_device_is_named_with_its_first_deviation_and_bit(bit: int) -> None:
    outcome = stressed([None, Flip(0.3, bit, seed=2), None])
    assert outcome.faulty == ["device 1"]
    assert outcome.unresolved == []
    faults = outcome.faults["device 1"]
    analysed = [fault for fault in faults if fault.shape]
    assert {fault.mode for fault in faults} >= {ALONE, TOGETHER}
    assert analysed
    for fault in analysed:
        assert fault.shape
        assert (fault.shape.place, fault.shape.bits) == (corruption.SINGLE, (bit,)), fault
    assert [fault.seconds for fault in analysed] == sorted(fault.seconds for fault in analysed)
    text = render_terminal(stress_document(outcome))
    assert "1 of 3 devices deviate: device 1" in text
    assert f"flipped bits: bit {bit} {len(analysed)}" in " ".join(text.split())
    assert f"first deviation: {faults[0].kernel}" in " ".join(text.split())


def test_sound_devices_are_not_reported() -> None:
    outcome = stressed([None] * 3)
    assert (outcome.faulty, outcome.odd, outcome.unresolved) == ([], [], [])
    modes = {mode for _, _, mode in outcome.counts}
    assert modes == {START, ALONE, TOGETHER}
    assert all(outcome.counts[f"device {n}", name, START] == ELECTION for n in range(3) for name in NAMES)
    assert "No deviation on 3 devices" in render_terminal(stress_document(outcome))


def test_every_repetition_is_compared_and_every_flip_is_found() -> None:
    outcome = stressed([None, Flip(1.0, 5), None])
    faults = outcome.faults["device 1"]
    after = sum(
        count for (name, _, mode), count in outcome.counts.items() if name == "device 1" and mode != START
    )
    assert sum(fault.mode != START for fault in faults) == after


def test_a_device_that_is_always_wrong_in_the_same_way_is_odd() -> None:
    class Wrong(Station):
        def result(self, name: str) -> torch.Tensor:
            output = super().result(name)
            return output * 2 if name == NAMES[0] else output

    stations = [Station("cpu", MEMORY), Wrong("cpu", MEMORY), Station("cpu", MEMORY)]
    workers = [ThreadWorker(f"device {number}", station) for number, station in enumerate(stations)]
    outcome = Stress(workers, NAMES, 3600.0, None, Rounds(10), 5).run()
    assert outcome.odd == [(NAMES[0], "device 1")]
    assert outcome.faulty == ["device 1"]
    two = Stress(workers[:2], NAMES, 3600.0, None, Rounds(10), 5).run()
    assert two.faulty == []
    assert two.unresolved == [f"{NAMES[0]} on device 0, device 1"]
    for worker in workers:
        worker.close()


def test_one_device_alone_is_compared_with_its_own_majority() -> None:
    assert stressed([None]).faulty == []
    outcome = stressed([Flip(0.1, 20, seed=3)], turns=60)
    assert outcome.faulty == ["device 0"]


def test_a_device_without_an_answer_is_reported_and_the_others_continue() -> None:
    class Dying(ThreadWorker):
        asked = 0

        def request(self, method: str, *arguments: object) -> None:
            self.asked += 1
            if self.asked == 12:
                raise DeviceLostError(f"{self.name} ended with exit status -9")
            super().request(method, *arguments)

    workers = [
        Dying("device 0", Station("cpu", MEMORY)),
        *(ThreadWorker(f"device {n}", Station("cpu", MEMORY)) for n in (1, 2)),
    ]
    outcome = Stress(workers, NAMES, 3600.0, None, Rounds(len(NAMES) + 40), 5).run()
    for worker in workers:
        worker.close()
    assert outcome.faulty == ["device 0"]
    assert "exit status -9" in outcome.lost["device 0"]
    assert outcome.repetitions("device 1") > outcome.repetitions("device 0")


@pytest.mark.parametrize("name", PATTERNS)
def test_a_memory_pattern_shows_each_stuck_and_flipped_bit_at_its_address(name: str) -> None:
    class Stuck(torch.Tensor):
        """Memory whose element 37 has bit 11 stuck at 1 after each write."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = super().__torch_function__(func, types, args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                memory.bitwise_or_(mask)
            return output

    plain = torch.zeros(64, dtype=torch.int64)
    assert not PATTERNS[name](plain.clone()).any()
    memory = plain.clone()
    mask = torch.zeros_like(memory)
    mask[37] = 1 << 11
    wrong = PATTERNS[name](memory.as_subclass(Stuck)).as_subclass(torch.Tensor)
    assert wrong[37] == 1 << 11
    assert wrong.count_nonzero() == 1


def test_every_kernel_of_the_cpu_is_deterministic_and_patterns_are_zero() -> None:
    station = Station("cpu", MEMORY)
    for name, kernel in station.kernels.items():
        batch = station.batch(name, 3)
        assert len(set(batch.digests)) == 1, name
        assert batch.deviations == []
        assert not kernel.exact or set(batch.digests) == {0}
    assert len({kernel.name for kernel in kernels("cpu")}) == len(kernels("cpu"))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_golden_digest_has_a_majority_of_voters(votes: list[list[int]]) -> None:
    named = {f"v{number}": digests for number, digests in enumerate(votes)}
    found = elect(named)
    opinions = [next((d for d in digests if 2 * digests.count(d) > len(digests)), None) for digests in votes]
    clear = [value for value in opinions if value is not None]
    expected = next((value for value in clear if 2 * clear.count(value) > len(clear)), None)
    assert found.golden == expected
    if expected is not None:
        assert set(found.odd) == {f"v{n}" for n, value in enumerate(opinions) if value != expected}


def test_machines_are_compared_by_their_files(tmp_path: Path) -> None:
    outcome = stressed([None, None, None], turns=1)
    for name in ("a", "b", "c"):
        write_stress(outcome, tmp_path, name)
    sentences, odd = compare_machines(tmp_path)
    assert odd == []
    assert sentences[0].startswith("3 machines agree in every kernel: a, b, c")
    (kind,) = outcome.golden
    outcome.golden[kind][NAMES[0]] ^= 1
    write_stress(outcome, tmp_path, "b")
    sentences, odd = compare_machines(tmp_path)
    assert odd == ["b"]
    assert f"{NAMES[0]}: b differ from the majority of 3" in sentences[0]
    (tmp_path / "stress-d.json").write_text("{}")
    with pytest.raises(NumericsError, match=r"stress-d\.json has no golden digests"):
        compare_machines(tmp_path)


def test_the_file_has_every_fault_as_plain_data() -> None:
    outcome = stressed([None, Flip(1.0, 9), None], turns=8)
    content = json.loads(json.dumps(as_json(outcome, "x")))
    assert content["faulty"] == ["device 1"]
    assert {tuple(fault["shape"]["bits"]) for fault in content["faults"] if fault["shape"]} == {(9,)}


@pytest.mark.parametrize("text", ["", "1", "3:0.1:2", "0:2:2", "0:0.1:63", "x:0.1:2"])
def test_a_wrong_simulation_is_refused(text: str) -> None:
    with pytest.raises(NumericsError, match="is not a fault; fix: DEVICE:RATE:BIT"):
        parse_fault(text, 3)


@pytest.mark.parametrize("given_minutes", ["0", "-1", "nan", "1e9"])
def test_wrong_minutes_are_one_line(given_minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "-m", given_minutes]) == 1
    assert "minutes cannot be used; fix" in capsys.readouterr().err


def test_sigint_ends_the_command_with_the_report_so_far_and_the_faulty_process_is_found(
    tmp_path: Path,
) -> None:
    """One stress of a process from beginning to end, with a simulated fault, ended by SIGINT."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "numerics", "stress", "--minutes", "10", "--devices", "cpu",
            "--simulate", "0:1.0:21", "--memory", "1", "-o", str(tmp_path),
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    try:
        while (line := process.stdout.readline()) and not line.startswith("golden results of"):
            pass
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, err
    text = " ".join(out.split())
    assert "1 of 1 devices deviate: cpu" in text
    assert "(stopped before the end)" in text
    (file,) = tmp_path.glob("stress-*.json")
    content = json.loads(file.read_text())
    assert (content["faulty"], content["stopped"]) == (["cpu"], True)
