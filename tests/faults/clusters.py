"""Several runs at once, on this machine, on a real Slurm and on a real Ray cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.attempt import Attempt, read_attempt
from tests.faults.harness import Bench, CannotDoError, fault, outcome
from tests.faults.slurm_cluster import SlurmCluster
from tests.faults.workplace import PATIENCE_SECONDS, Workplace, injected, wait_for

NUMBERS = "the undisturbed numbers; no process left"


def same_numbers(bench: Bench, place: Workplace, names: tuple[str, ...] = ("B0",)) -> bool:
    """Whether the runs have the numbers of an undisturbed study on this machine, and no process is left."""
    seeds = {"SEEDS": f"{len(names)}"} if len(names) > 1 else {}
    good = all(place.numbers(name) == bench.undisturbed(name, **seeds) for name in names)
    return good and not place.orphans()


def arrays(place: Workplace) -> list[list[str]]:
    """The runs of each array that was submitted to Slurm, in order."""
    files = sorted((place.study / "slurm").glob("*.tasks"), key=lambda path: path.stat().st_mtime_ns)
    found = ([Path(plan).parent.name for plan in path.read_text().splitlines()] for path in files)
    return [names for names in found if (place.study / "runs" / names[0]).exists()]


def attempts(place: Workplace, names: tuple[str, ...] = ("B0",)) -> list[Attempt | None]:
    """The process that trained each run last."""
    return [read_attempt(place.run_dir(name)) for name in names]


def trainer(place: Workplace, name: str = "B0") -> int:
    """The process that trains a run."""
    (process,) = [number for number, words in place._processes() if f"runs/{name}/plan.json" in words]
    return process


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/status").read_text().partition("PPid:")[2].split()[0])


@contextmanager
def slurm(bench: Bench, jobs: int = 10_000, **changes: str) -> Iterator[tuple[SlurmCluster, Workplace]]:
    """A running Slurm that accepts this many jobs, and a study that uses it."""
    place = bench.workplace(EXECUTOR_SLURM="y", SLURM_OPTIONS="--cpus-per-task=1", **changes)
    with SlurmCluster(place.folder / "cluster", jobs) as cluster:
        yield cluster, place


@fault("SIGKILL of one of two runs at once", f"one failed, the other finished; `make` ends at {NUMBERS}")
def one_of_two(bench: Bench) -> str:
    place = bench.workplace(SLOTS="2", SEEDS="2")
    process = place.start(**injected(None, slower=0.3))
    wait_for(lambda: min(place.steps("B0"), place.steps("B1")) > 3)
    place.send(signal.SIGKILL, "results/gpt2-ra-ablation-smoke/runs/B1/plan.json")
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    states = (place.status("B0"), place.status("B1"), process.returncode)
    done = place.make()
    good = states == ("finished", "failed", 1) and not done.returncode
    expected = f"one failed, the other finished; `make` ends at {NUMBERS}"
    return outcome(good and same_numbers(bench, place, ("B0", "B1")), expected, f"{states} {output[-300:]}")


FOUR = ("B0", "B1", "B2", "B3")
FENCED = (
    f"a second `make` is refused; without a common flock it takes the runs over; each run ends at {NUMBERS}"
)


@fault("two drivers of one study, two runs at once each", FENCED)
def local_drivers(bench: Bench) -> str:
    place = bench.workplace(SLOTS="2", SEEDS="4")
    slow = injected(None, slower=0.3)
    first = place.start(**slow)
    wait_for(lambda: min(place.steps("B0"), place.steps("B1")) > 3)
    place.send(signal.SIGSTOP, "scripts.train")  # believed dead
    before = attempts(place, FOUR[:2])
    refused = place.command("scripts.study")
    (place.study / "lock").unlink()  # as on two machines, where neither sees the other's flock
    second = place.start(**slow)
    wait_for(lambda: place.status("B0") == "finished")
    place.send(signal.SIGCONT, "scripts.train")  # they come back
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in (first, second)]
    good = refused.returncode == 1 and f"is being run by process {first.pid} on" in refused.stdout
    good = good and second.returncode == 0 and outputs[0].count("was taken over by process") >= 2
    good = good and not set(before) & set(attempts(place, FOUR[:2])) and same_numbers(bench, place, FOUR)
    return outcome(good, FENCED, f"{refused.stdout[-200:]} {before} {outputs} ")


LIMITED = f"the job saves, is requeued and ends at {NUMBERS}"


@fault("Slurm: the time limit in the middle of a run", LIMITED)
def time_limit(bench: Bench) -> str:
    """The run lasts longer than the limit of three minutes. Slurm sends a signal up to a minute too early."""
    with slurm(bench) as (cluster, place):
        place.configure(
            EXECUTOR_SLURM="y",
            DATA_DIR=str(bench.folder / "data"),
            SLURM_OPTIONS="--cpus-per-task=1 --time=3 --signal=B:USR1@90",
        )
        process = place.start(**cluster.environment, **injected(None, slower=3.0))
        wait_for(lambda: place.steps() > 3)
        before = attempts(place)
        output, _ = process.communicate(timeout=2 * PATIENCE_SECONDS)
        good = not process.returncode and arrays(place) == [["B0"]] and attempts(place) != before
        good = good and same_numbers(bench, place)
    return outcome(good, LIMITED, f"submitted {arrays(place)} {before} {output[-600:]}")


LOST_NODE = f"its run continues on the other node and ends at {NUMBERS}"


@fault("Slurm: a node is killed with its run", LOST_NODE)
def slurm_node(bench: Bench) -> str:
    with slurm(bench) as (cluster, place):
        process = place.start(**cluster.environment, **injected(None, slower=0.3))
        wait_for(lambda: place.steps() > 8)
        node = cluster.run("squeue", "--noheader", "-o", "%N").split()[0]
        cluster.kill_node(node, place.folder)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        good = not process.returncode and same_numbers(bench, place)
        state = cluster.run("sinfo", "-h", "-N", "-n", node, "-o", "%T")
    return outcome(good and "down" in state, LOST_NODE, f"{state} {output[-600:]}")


ATTACHED = f"the second `make` follows the same two jobs and ends at {NUMBERS}"


@fault("Slurm: SIGKILL of the driver, and a second `make`", ATTACHED)
def two_drivers(bench: Bench) -> str:
    with slurm(bench, SEEDS="2") as (cluster, place):
        slow = injected(None, slower=0.3)
        process = place.start(**cluster.environment, **slow)
        wait_for(lambda: min(place.steps("B0"), place.steps("B1")) > 3)
        during = place.command("scripts.study", **cluster.environment)
        process.kill()
        process.communicate()
        done = place.command("scripts.study", **cluster.environment, **slow)
        good = during.returncode == 1 and "is being run by process" in during.stdout
        good = good and not done.returncode and arrays(place) == [["B0", "B1"]]
        good = good and same_numbers(bench, place, ("B0", "B1"))
    return outcome(good, ATTACHED, f"{during.stdout[-200:]} {arrays(place)} {done.stdout[-600:]}")


FOLLOWS = f"without a common flock it follows the same jobs; no run is submitted twice; both end at {NUMBERS}"


@fault("Slurm: a second `make` beside the first", FOLLOWS)
def slurm_drivers(bench: Bench) -> str:
    with slurm(bench, SEEDS="2") as (cluster, place):
        slow = injected(None, slower=0.5)
        first = place.start(**cluster.environment, **slow)
        wait_for(lambda: min(place.steps("B0"), place.steps("B1")) > 3)
        before = attempts(place, ("B0", "B1"))
        (place.study / "lock").unlink()
        second = place.start(**cluster.environment, **slow)
        outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in (first, second)]
        good = [first.returncode, second.returncode] == [0, 0] and arrays(place) == [["B0", "B1"]]
        good = good and attempts(place, ("B0", "B1")) == before and same_numbers(bench, place, ("B0", "B1"))
    return outcome(good, FOLLOWS, f"{arrays(place)} {before} {outputs[1][-900:]}")


LIMIT = f"what Slurm refuses is submitted later; no job is cancelled; each run ends at {NUMBERS}"


@fault("Slurm: no more jobs than MaxJobCount", LIMIT)
def job_limit(bench: Bench) -> str:
    with slurm(bench, jobs=3, SEEDS="4") as (cluster, place):
        process = place.start(**cluster.environment, **injected(None, slower=0.1))
        output, _ = process.communicate(timeout=2 * PATIENCE_SECONDS)
        refused = "submitted later" in output or len(arrays(place)) > 1
        good = not process.returncode and refused and same_numbers(bench, place, FOUR)
    return outcome(good, LIMIT, f"{arrays(place)} {output[-900:]}")


ARRAY = f"one array; the killed task alone is submitted again; each run ends at {NUMBERS}"


@fault("Slurm: an array of four runs, and SIGKILL of one task", ARRAY)
def array(bench: Bench) -> str:
    """The task leaves no exit.json, as after a power cut."""
    with slurm(bench, SEEDS="4") as (cluster, place):
        process = place.start(**cluster.environment, **injected(None, slower=0.5))
        wait_for(lambda: min(map(place.steps, FOUR)) > 8)
        at_once = cluster.run("squeue", "--noheader", "--array", "--states=RUNNING", "-o", "%i").split()
        before = attempts(place, FOUR)
        worker = trainer(place, "B2")
        script = parent(worker)
        for number, killed in ((signal.SIGSTOP, script), (signal.SIGKILL, worker), (signal.SIGKILL, script)):
            os.kill(killed, number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        numbers = {name.partition("_")[0] for name in at_once}
        good = not process.returncode and len(at_once) == 4 and len(numbers) == 1
        good = (
            good
            and arrays(place) == [[*FOUR], ["B2"]]
            and [one == other for one, other in zip(before, attempts(place, FOUR), strict=True)]
            == [True, True, False, True]
        )
        good = good and "lost with its machine" in output and same_numbers(bench, place, FOUR)
    return outcome(good, ARRAY, f"{at_once} {arrays(place)} {before} {output[-900:]}")


CANCELLED = f"the run saves and is not repeated; `make` ends at {NUMBERS}"


@fault("Slurm: Ctrl-C at the driver, then scancel", CANCELLED)
def scancel(bench: Bench) -> str:
    with slurm(bench) as (cluster, place):
        process = place.start(**cluster.environment, **injected(None, slower=0.3))
        wait_for(lambda: place.steps() > 8)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        left = place.steps()
        wait_for(lambda: place.steps() > left)  # the job goes on without its driver
        cluster.run("scancel", *output.partition("scancel ")[2].split()[:3])
        wait_for(lambda: not place.orphans())
        status = place.status()
        wait_for(lambda: not cluster.run("squeue", "--noheader").strip())
        time.sleep(5.0)  # a job that was put back would be in the queue
        queue = cluster.run("squeue", "--noheader").strip()
        done = place.command("scripts.study", **cluster.environment)
        good = process.returncode == 130 and not queue and status == "interrupted"
        good = good and not done.returncode and same_numbers(bench, place)
    return outcome(good, CANCELLED, f"{queue} {status} {output[-300:]} {done.stdout[-300:]}")


@contextmanager
def ray_cluster(bench: Bench) -> Iterator[tuple[Any, list[Any], Workplace]]:
    """A Ray cluster of two nodes that can run one task each, behind a head that runs none; and a study for it."""
    try:
        from ray.cluster_utils import Cluster
    except ModuleNotFoundError:
        raise CannotDoError("Ray is not installed; fix: pip install ray") from None
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        yield cluster, nodes, bench.workplace(EXECUTOR_RAY="y", RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()


def busy_node(nodes: list[Any], place: Workplace) -> Any:
    """The node whose raylet has the run among its descendants."""
    process = trainer(place)
    while process > 1:
        process = parent(process)
        for node in nodes:
            if node.all_processes["raylet"][0].process.pid == process:
                return node
    raise AssertionError("no raylet has the run")


RETRIED = f"the run is retried on the other node and ends at {NUMBERS}"


@fault("Ray: a node is killed with its run", RETRIED)
def ray_node(bench: Bench) -> str:
    with ray_cluster(bench) as (cluster, nodes, place):
        process = place.start(**injected(None, slower=0.3))
        wait_for(lambda: place.steps() > 8)
        processes, node = (parent(trainer(place)), trainer(place)), busy_node(nodes, place)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a power cut: the node with its processes
            for one in processes:
                os.kill(one, number)
            if number == signal.SIGSTOP:
                cluster.remove_node(node, allow_graceful=False)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        good = not process.returncode and same_numbers(bench, place)
    return outcome(good, RETRIED, output[-900:])


CUT_OFF = f"the run saves, is retried and ends at {NUMBERS}"


@fault("Ray: SIGKILL of a node's raylet alone", CUT_OFF)
def ray_cut_off(bench: Bench) -> str:
    return ray_without(
        bench,
        lambda cluster, nodes, place: cluster.remove_node(busy_node(nodes, place), allow_graceful=False),
    )


@fault("Ray: SIGKILL of the worker of Ray that has the run", CUT_OFF)
def ray_worker(bench: Bench) -> str:
    return ray_without(bench, lambda cluster, nodes, place: os.kill(parent(trainer(place)), signal.SIGKILL))


def ray_without(bench: Bench, kill: Callable[[Any, list[Any], Workplace], None]) -> str:
    """Kill a part of Ray beside a run that trains on."""
    with ray_cluster(bench) as (cluster, nodes, place):
        process = place.start(**injected(None, slower=0.5))
        wait_for(lambda: place.steps() > 8)
        before = attempts(place)
        kill(cluster, nodes, place)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        good = not process.returncode and attempts(place) != before and same_numbers(bench, place)
    return outcome(good, CUT_OFF, output[-900:])


DRIVERLESS = f"its run saves and ends with it; `make` ends at {NUMBERS}"


@fault("Ray: SIGKILL of the driver", DRIVERLESS)
def ray_driver(bench: Bench) -> str:
    with ray_cluster(bench) as (_, _, place):
        process = place.start(**injected(None, slower=0.3))
        wait_for(lambda: place.steps() > 8)
        process.kill()
        process.communicate()
        wait_for(lambda: not place.orphans())
        status = place.status()
        done = place.command("scripts.study")  # a cluster cannot end while this process is connected to it
        good = status == "interrupted" and not done.returncode and same_numbers(bench, place)
    return outcome(good, DRIVERLESS, f"{status} {done.stdout[-900:]}")
