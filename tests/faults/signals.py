"""Faults from outside: signals, killed processes, dead terminals, a second `make`."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import time
from typing import Any

from tests.faults.harness import Bench, CannotDoError, fault, outcome
from tests.faults.workplace import PATIENCE_SECONDS, Workplace, injected, wait_for

SAME = "interrupted and saved; `make` ends at the undisturbed numbers; no process left"
WITHIN = "within one step " + SAME


def stopped_then_resumed(bench: Bench, injection: dict[str, Any], **changes: str) -> str:
    """Inject a fault, check the interrupted study, run `make`, compare with the undisturbed study."""
    place = bench.workplace(**changes)
    first = place.make(injection)
    wait_for(lambda: not place.orphans())
    status = place.status()
    if first.returncode != 130:
        return f"exit status {first.returncode}: {first.stdout[-300:]}"
    if status != "interrupted":
        return f"status {status}"
    before = "interrupted and saved"
    if injection["place"] in ("step", "accumulation"):  # sent during the step after `at` iterations
        late = place.record()["progress"]["iterations"] - injection["at"]
        before = f"{'within one step' if late <= 1 else f'{late} steps later'} {before}"
    return after_resuming(bench, place, before, **changes)


def after_resuming(bench: Bench, place: Workplace, before: str, **changes: str) -> str:
    second = bench.make(place)
    if second.returncode:
        return f"exit status {second.returncode} of the second make: {second.stdout[-300:]}"
    left = place.orphans()
    same = place.numbers() == bench.undisturbed(**changes)
    return (
        f"{before}; `make` ends at {'the undisturbed' if same else 'OTHER'} numbers; "
        f"{left or 'no process'} left"
    )


@fault("SIGTERM while it trains", WITHIN)
def term_in_training(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "step", "at": 20, "action": "TERM"})


@fault("SIGINT while it trains", WITHIN)
def int_in_training(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "step", "at": 21, "action": "INT"})


@fault("SIGHUP: the terminal is closed", WITHIN)
def hup_in_training(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "step", "at": 22, "action": "HUP"})


@fault("SIGTERM in the middle of an accumulation", WITHIN)
def term_in_accumulation(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "accumulation", "at": 23, "action": "TERM"})


@fault("SIGTERM while the step is compiled", SAME)
def term_in_compiling(bench: Bench) -> str:
    if not shutil.which("g++"):
        raise CannotDoError("torch.compile needs a C++ compiler on a CPU, and there is none here")
    return stopped_then_resumed(bench, {"place": "compile", "action": "TERM"}, COMPILE="y")


@fault("SIGTERM during validation", SAME)
def term_in_evaluation(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "evaluate", "at": 30, "action": "TERM"})


@fault("SIGTERM during HellaSwag", SAME)
def term_in_hellaswag(bench: Bench) -> str:
    changes = {"HELLASWAG": "y", "HELLASWAG_FILE": str(bench.hellaswag), "HELLASWAG_LIMIT": "12"}
    return stopped_then_resumed(bench, {"place": "hellaswag", "at": 0, "action": "TERM"}, **changes)


@fault("SIGTERM while a checkpoint is written", SAME)
def term_in_save(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "save", "at": 20, "action": "TERM"})


@fault("SIGKILL of the study", SAME, quick=True)
def kill_of_the_parent(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 15)
    process.kill()
    process.wait()
    wait_for(lambda: not place.orphans())
    status = place.status()
    return after_resuming(
        bench, place, "interrupted and saved" if status == "interrupted" else f"status {status}"
    )


KILLED = "failed, killed by SIGKILL; `make` ends at the undisturbed numbers; no process left"


def killed(bench: Bench, injection: dict[str, Any]) -> str:
    place = bench.workplace()
    place.make(injection)
    record = place.record()
    named = "killed by SIGKILL" in str(record["error"])
    return after_resuming(bench, place, f"{record['status']}{', killed by SIGKILL' if named else ''}")


@fault("SIGKILL of the training process", KILLED)
def kill_in_training(bench: Bench) -> str:
    return killed(bench, {"place": "step", "at": 28, "action": "kill"})


@fault("SIGKILL in the middle of an accumulation", KILLED)
def kill_in_accumulation(bench: Bench) -> str:
    return killed(bench, {"place": "accumulation", "at": 29, "action": "kill"})


@fault("SIGKILL while a checkpoint is written", KILLED)
def kill_in_save(bench: Bench) -> str:
    return killed(bench, {"place": "save", "at": 24, "action": "kill"})


@fault("SIGKILL during validation", KILLED)
def kill_in_evaluation(bench: Bench) -> str:
    return killed(bench, {"place": "evaluate", "at": 30, "action": "kill"})


@fault(
    "SIGKILL of study and training at once: power cut",
    "record says running; `make` ends at the undisturbed numbers; no process left",
)
def power_cut(bench: Bench) -> str:
    place = bench.workplace()
    place.make({"place": "step", "at": 28, "action": "kill-both"})
    return after_resuming(bench, place, f"record says {place.status()}")


@fault("two SIGTERMs, a SIGHUP and a first SIGINT in the middle of an accumulation", WITHIN, quick=True)
def two_terms(bench: Bench) -> str:
    return stopped_then_resumed(bench, {"place": "accumulation", "at": 20, "action": "TERM HUP TERM INT"})


@fault(
    "SIGTERM while steps are timed for the plan",
    "stopped with 130, nothing recorded as failed; `make` then runs",
)
def term_in_planning(bench: Bench) -> str:
    place = bench.workplace(GPT2_MAX_TIME="4", GPT2_MAX_ITERS="0")
    process = place.start()
    wait_for(lambda: any("Steps.json" in words for words in place.orphans()))
    time.sleep(2.0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    stopped = process.returncode == 130 and "stopped" in output and not place.orphans()
    second = place.command("scripts.study")
    expected = "stopped with 130, nothing recorded as failed; `make` then runs"
    return outcome(stopped and not second.returncode, expected, f"{process.returncode} {output[-300:]}")


STAYS = "the next `make` waits for nobody: it names the process that still saves, and a later `make` resumes"


@fault("SIGKILL of the study, and `make` at once while its training process saves", STAYS)
def make_at_once(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**injected(None, slower=2.0))
    wait_for(lambda: place.steps() > 1)
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)
    place.send(signal.SIGSTOP, "scripts.train")  # it still saves, however slowly the next command starts
    at_once = place.command("scripts.study")
    place.send(signal.SIGCONT, "scripts.train")
    reported = at_once.returncode == 1 and "is being run by" in at_once.stdout
    wait_for(lambda: not place.orphans())
    found = after_resuming(bench, place, "x")
    same = found == "x; `make` ends at the undisturbed numbers; no process left"
    return outcome(reported and same, STAYS, f"{at_once.stdout[-200:]} {found}")


@fault("two SIGINTs", "exits at once with 130; `make` ends at the undisturbed numbers; no process left")
def two_interrupts(bench: Bench) -> str:
    place = bench.workplace()
    # the first finds a step that lasts for minutes: only the second request can end it soon
    process = place.start(**injected({"place": "step", "at": 20, "action": "INT", "stuck": 600}))
    wait_for(lambda: (place.folder / "fault-fired").exists())
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    try:
        status = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return "still there after a minute"
    return after_resuming(bench, place, f"exits at once with {status}")


@fault("twenty SIGKILLs at random moments", "the records equal those of an undisturbed study")
def twenty_kills(bench: Bench) -> str:
    place = bench.workplace(**bench.long)
    kills = 0
    while kills < 20:
        process = place.start(**bench.slow)
        # after some steps, at a random moment; the whole group dies as in a power cut
        before = place.steps()
        wait_for(lambda p=process, b=before: place.steps() > b + 1 or p.poll() is not None)
        if process.poll() is not None:
            return f"ended with {process.returncode} after {kills} kills: {place.status()}"
        try:
            process.wait(bench.random.uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            kills += 1
        bench.kill_all(place, process)
    done = place.make()
    same = place.numbers() == bench.undisturbed(**bench.long)
    return outcome(
        not done.returncode and same, "the records equal those of an undisturbed study", done.stdout[-300:]
    )


@fault(
    "a second `make` in the same study",
    "refused, naming the process that holds it; the first goes on",
    quick=True,
)
def second_make(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 3)
    place.send(signal.SIGSTOP, "scripts.train")  # not over before the second one begins
    second = place.here("scripts.study")
    place.send(signal.SIGCONT, "scripts.train")
    reported = f"is being run by process {process.pid}" in second.stdout and second.returncode == 1
    process.communicate(timeout=PATIENCE_SECONDS)
    went_on = process.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(
        reported and went_on,
        "refused, naming the process that holds it; the first goes on",
        second.stdout[-300:],
    )


@fault("the lock of a process that is dead", "taken over; the study ends")
def stale_lock(bench: Bench) -> str:
    place = bench.workplace()
    place.study.mkdir(parents=True)
    (place.study / "lock").write_text("1\n")  # alive, but not the holder of the lock
    done = place.make()
    return outcome(done.returncode == 0, "taken over; the study ends", done.stdout[-300:])


@fault(
    "the reader of its output is gone",
    "goes on to its end; `make` ends at the undisturbed numbers; no process left",
)
def closed_pipe(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 3)
    assert process.stdout
    process.stdout.close()
    status = process.wait()
    before = "goes on to its end" if not status and place.status() == "finished" else f"exit status {status}"
    return after_resuming(bench, place, before)


STOPPED = "the undisturbed numbers; the seconds of the stop are in no clock"


@fault("SIGSTOP for 20 s while it trains, then SIGCONT", STOPPED)
def stopped_for_a_while(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 20)
    place.send(signal.SIGSTOP, "scripts.train")
    time.sleep(20)
    place.send(signal.SIGCONT, "scripts.train")
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    seconds = [line["train_seconds"] for line in place.metrics() if line["event"] == "train"]
    longest = max(after - before for before, after in itertools.pairwise(seconds))
    same = place.numbers() == bench.undisturbed()
    return outcome(
        same and longest < 15, STOPPED, f"same {same}, longest step {longest:.0f} s {output[-300:]}"
    )


REFUSED = "`make mrproper` removes nothing and names the lock; the study ends at the undisturbed numbers"


@fault("make mrproper while it trains", REFUSED)
def cleaned_while_it_trains(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 5)
    done = place.command("scripts.dev.clean", "caches", "data", "config", "venv")
    process.communicate(timeout=PATIENCE_SECONDS)
    refused = done.returncode == 1 and "nothing is removed" in done.stdout
    same = place.status() == "finished" and place.numbers() == bench.undisturbed()
    return outcome(refused and same, REFUSED, f"refused {refused} same {same} {done.stdout[-300:]}")


ASCII = "exit status 0, the table and the undisturbed numbers"


@fault("a terminal in ASCII, in the C locale", ASCII)
def ascii_terminal(bench: Bench) -> str:
    place = bench.workplace()
    done = place.command(LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    good = not done.returncode and "variant  seeds  perplexity" in done.stdout
    same = place.numbers() == bench.undisturbed()
    return outcome(good and same, ASCII, f"good {good} same {same} {done.stdout[-400:]}")
