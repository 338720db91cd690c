"""Faults around the study: trackers and hubs, configurations, records of others."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.busy_machine import other_work
from tests.checked_files import write_checked
from tests.faults.harness import Bench, CannotDoError, fault, outcome
from tests.faults.workplace import ROOT, STUDY, Workplace, injected, wait_for

TRACKERS = Path(__file__).with_name("trackers")
UNCHANGED = "exit status 0, every line of metrics there, the undisturbed numbers, no process left"


def beside(environment: dict[str, str], behaviour: str) -> dict[str, str]:
    """Return the environment with a fake W&B."""
    paths = [str(TRACKERS), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "TRACKER": behaviour}


def tracked(bench: Bench, behaviour: str) -> str:
    place = bench.workplace(WANDB="y", WANDB_MODE="online")
    done = place.command("scripts.study", **beside({}, behaviour))
    same = place.status() == "finished" and place.numbers() == bench.undisturbed()
    whole = len([line for line in place.metrics() if line["event"] == "train"]) == 40
    left = place.orphans()
    good = not done.returncode and same and whole and not left
    return outcome(good, UNCHANGED, f"same {same} whole {whole} left {left} {done.stdout[-300:]}")


@fault("a tracker that refuses", UNCHANGED)
def tracker_refuses(bench: Bench) -> str:
    return tracked(bench, "refuse")


@fault("a tracker that hangs for 60 s", UNCHANGED)
def tracker_hangs(bench: Bench) -> str:
    return tracked(bench, "hang")


@fault("a tracker that dies in the middle", UNCHANGED)
def tracker_dies(bench: Bench) -> str:
    return tracked(bench, "die")


ENDED = "the tracker and what it started are ended soon after; no process left"


@fault("SIGKILL of study and training beside a tracker that hangs", ENDED)
def kill_beside_a_tracker(bench: Bench) -> str:
    place = bench.workplace(WANDB="y", WANDB_MODE="online")
    process = place.start(**beside(injected(None, slower=2.0), "hang for good"))
    try:
        wait_for(lambda: sum("study.trackers" in words for words in place.orphans()) == 2)
        place.kill("scripts.train")  # before the study, whose end asks it to stop
        process.kill()
        process.wait()
        beside_it = len(place.orphans())
        wait_for(lambda: not place.orphans())  # it would hang for longer than this waits
    finally:
        bench.kill_all(place, process)
    return outcome(beside_it == 2, ENDED, f"{beside_it} processes when the study was dead, not 2")


SENT = "`make` has nothing to train: the tracker gets the final numbers all the same, and how to send them is shown"


@fault("SIGTERM during HellaSwag beside a tracker that is offline", SENT)
def tracked_to_the_end(bench: Bench) -> str:
    scored = {"HELLASWAG": "y", "HELLASWAG_FILE": str(bench.hellaswag), "HELLASWAG_LIMIT": "12"}
    place = bench.workplace(WANDB="y", WANDB_MODE="offline", **scored)
    fault = injected({"place": "hellaswag", "at": 0, "action": "TERM"})
    first = place.command(**beside(fault, "keep"))
    before, interrupted = place.steps(), first.returncode == 130 and place.status() == "interrupted"
    second = place.command(**beside(injected(None), "keep"))
    folders = sorted((place.run_dir() / "wandb").iterdir())
    output = (folders[-1] / "received.jsonl").read_text().splitlines()
    final = json.loads(output[-1]) if output else {}
    sent = final.get("hellaswag/acc") == place.record()["hellaswag"]["acc"]
    shown = f"-m wandb sync results/{STUDY}/runs/*/wandb/offline-run-*" in second.stdout
    nothing = place.steps() == before and place.status() == "finished"
    good = interrupted and nothing and len(folders) == 1 and sent and shown and not place.orphans()
    return outcome(
        good,
        SENT,
        f"{interrupted} {nothing} {len(folders)} folders, sent {sent}, shown {shown} {second.stdout[-300:]}",
    )


NO_HUB = "refused before any training, naming DATASET_FILES and DATASET_EMBEDDED"


@fault("a hub that cannot be reached", NO_HUB)
def no_hub(bench: Bench) -> str:
    place = bench.workplace(DATASET_TINYSTORIES="y", DATASET_FILES="", DATA_DIR="data")
    done = place.command(
        "scripts.study", HF_ENDPOINT="http://127.0.0.1:9", http_proxy="", https_proxy="", ALL_PROXY=""
    )
    named = "CONFIG_DATASET_FILES" in done.stdout and "CONFIG_DATASET_EMBEDDED" in done.stdout
    return outcome(done.returncode == 1 and named and not place.steps(), NO_HUB, done.stdout[-400:])


@fault(
    "a HellaSwag source that does not answer",
    "recorded as absent with the reason; the study ends",
)
def no_hellaswag(bench: Bench) -> str:
    place = bench.workplace(HELLASWAG="y", HELLASWAG_FILE="")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        proxy = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        done = place.command("scripts.study", https_proxy=proxy, HTTPS_PROXY=proxy)
    record = place.record()["hellaswag"]
    good = not done.returncode and list(record) == ["absent"] and record["absent"]
    return outcome(
        bool(good), "recorded as absent with the reason; the study ends", f"{record} {done.stdout[-300:]}"
    )


@fault(
    "a configuration that changed after the first run",
    "refused, every differing symbol named with both values",
    quick=True,
)
def changed(bench: Bench) -> str:
    place = bench.finished()
    before = place.numbers()
    place.configure(LEARNING_RATE="2e-3", EFFECTIVE_BATCH="8", DATA_DIR=str(bench.folder / "data"))
    done = place.here("scripts.study")
    named = all(f"CONFIG_{name}: " in done.stdout for name in ("LEARNING_RATE", "EFFECTIVE_BATCH"))
    good = done.returncode == 1 and named and place.numbers() == before
    return outcome(good, "refused, every differing symbol named with both values", done.stdout[-400:])


@fault(
    "a .config with shell characters in its values", "rejected or taken as text; nothing is run", quick=True
)
def shell_characters(bench: Bench) -> str:
    place = bench.workplace()
    messages = []
    for value in ("$(touch ran)", "`touch ran`", "a; touch ran", "../../ran", "a b"):
        done = place.here("scripts.kconfig", "defconfig", f"{STUDY}+cpu", f"CONFIG_STUDY_NAME={value}")
        if done.returncode == 0:
            done = place.here("scripts.study")
        messages.append(f"{value!r}: {done.returncode}")
    ran = [*place.folder.rglob("ran"), *place.folder.parent.glob("ran")]
    refused = all(entry.endswith(": 1") for entry in messages)
    return outcome(refused and not ran, "rejected or taken as text; nothing is run", f"{messages} {ran}")


MARKED = "each is marked with its reason and left out of every mean"


def broken_records(place: Workplace) -> dict[str, str]:
    """Runs that must not count, by folder."""
    good = (place.run_dir("B0") / "run.json").read_text()
    other = json.loads(good)
    del other["sha256"]
    return {
        "B1": good[: len(good) // 2],
        "B2": json.dumps(other | {"schema": 99, "run": "B2", "seed": 2}),
        "B3": json.dumps(other | {"run": "B3", "seed": 3, "status": "running"}),
        "B4": json.dumps(
            other | {"run": "B4", "seed": 4, "fingerprint": other["fingerprint"] | {"data": "else"}}
        ),
        "B5": "",
        "B6": good.replace('"loss"', '"lost"').replace('"B0"', '"B6"'),
    }


@fault("records that are torn, foreign, partial or of other data", MARKED, quick=True)
def bad_records(bench: Bench) -> str:
    place = bench.finished()
    loss = place.record()["validation"]["loss"]
    for name, text in broken_records(place).items():
        place.run_dir(name).mkdir()
        (place.run_dir(name) / "run.json").write_text(text)
    place.run_dir("B7").mkdir()
    done = place.here("scripts.report")
    report = json.loads((place.study / "report.json").read_text())
    (row,) = report["rows"]
    why = {run["name"]: run["why_not"] for run in report["runs"] if not run["used"]}
    left_out = sorted(why) == ["B1", "B2", "B3", "B4", "B5", "B6", "B7"] and all(why.values())
    good = not done.returncode and left_out and row["seeds"] == [0] and row["final_loss"]["mean"] == loss
    return outcome(good, MARKED, f"{why} {row['seeds']} {done.stdout[-300:]}")


INERT = "shown as text in every report"


@fault("a record with HTML and Markdown in its strings", INERT, quick=True)
def html_in_a_record(bench: Bench) -> str:
    place = bench.finished()
    record = place.record()
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)> [a](javascript:alert(1)) | b"
    record["target"]["device"] = attack
    record["notes"] = [attack]
    write_checked(place.run_dir() / "run.json", record)
    done = place.here("scripts.report")
    signs = {
        ".md": ("<script>alert(1)", "<img src=x", "[a](javascript:"),
        ".html": ("<script>alert(1)", "<img src=x"),
    }
    pages = {path.suffix: path.read_text() for path in place.study.glob("report.*") if path.suffix in signs}
    live = [sign for kind, page in pages.items() for sign in signs[kind] if sign in page]
    return outcome(
        not done.returncode and len(pages) == 2 and not live, INERT, f"{live} {done.stdout[-300:]}"
    )


PLAIN = "escaped in every output and page"


@fault("a record with control characters in its strings", PLAIN)
def control_characters(bench: Bench) -> str:
    place = bench.finished()
    record = place.record()
    record["target"]["device"] = "\x1b]0;owned\x07 \x9b31m \u202e"
    record["notes"] = [record["target"]["device"]]
    write_checked(place.run_dir() / "run.json", record)
    outputs = [place.command(f"scripts.{name}").stdout for name in ("report", "verify", "study")]
    pages = [path.read_text() for path in place.study.glob("report.*")]
    live = [sign for sign in "\x1b\x07\x9b\u202e" if any(sign in text for text in (*outputs, *pages))]
    shown = any("owned" in text for text in pages)
    return outcome(len(pages) == 3 and shown and not live, PLAIN, f"{live} {shown} {outputs[0][-200:]}")


NAMED_FOLDERS = "the folders are found and written by these names; nothing is run"


@fault("shell characters in the variables STUDIES and OUT of make", NAMED_FOLDERS)
def shell_in_variables(bench: Bench) -> str:
    place = bench.finished()
    (place.folder / "Makefile").symlink_to(ROOT / "Makefile")
    hostile = "it's $(touch ran) `touch ran`;touch ran"
    for name in ("a", "b"):
        shutil.copytree(place.study, place.folder / hostile / name)
    studies = " ".join(shlex.quote(f"{hostile}/{name}") for name in ("a", "b"))
    words = [f"PYTHON={sys.executable}", "compare", f"STUDIES={studies}", f"OUT={hostile}/page"]
    done = subprocess.run(
        ["make", *words], cwd=place.folder, env=place.environment(), capture_output=True, text=True
    )
    written = (place.folder / hostile / "page").is_dir()
    ran = [*place.folder.rglob("ran")]
    return outcome(
        not done.returncode and written and not ran,
        NAMED_FOLDERS,
        f"{ran} {done.stdout[-200:]} {done.stderr[-400:]}",
    )


BUSY = "counts within a tenth, the same losses at the same count, every run finishes"


def updates(place: Workplace) -> int:
    """Return the planned number of updates."""
    planned: int = place.plan()["variants"]["B"]["iterations"]
    return planned


def within_a_tenth(one: int, other: int) -> bool:
    return abs(one / other - 1) < 0.1


@fault("a machine that is busy with other work", BUSY)
def busy_machine(bench: Bench) -> str:
    timed = {
        "GPT2_MAX_TIME": "5",
        "GPT2_MAX_ITERS": "0",
        "EVAL_INTERVAL_TOKENS": "0",
        "CHECKPOINT_SECONDS": "600",
    }
    idle, busy = (bench.workplace(**timed) for _ in range(2))
    assert idle.command("scripts.study").returncode == 0
    count = updates(idle)
    with other_work(2 * (os.cpu_count() or 1)):
        beside_work = busy.command("scripts.study")
        second = bench.workplace(GPT2_MAX_ITERS=str(count), GPT2_MAX_TIME="0", EVAL_INTERVAL_TOKENS="0")
        same = second.command("scripts.study")
    whole = [place.status() for place in (busy, second)] == ["finished"] * 2
    losses = second.numbers()["losses"] == idle.numbers()["losses"]
    if beside_work.returncode or same.returncode or not whole or not losses:
        return outcome(False, BUSY, f"{whole} {losses} {beside_work.stdout[-300:]} {same.stdout[-300:]}")
    planned = updates(busy)
    if within_a_tenth(planned, count):
        return BUSY
    repeated = bench.workplace(**timed)
    assert repeated.command("scripts.study").returncode == 0
    if not within_a_tenth(updates(repeated), count):
        raise CannotDoError(
            f"the machine was busy before: two plans alone have {count} and {updates(repeated)} updates"
        )
    return outcome(False, BUSY, f"{planned} updates against {count} and {updates(repeated)} alone")
