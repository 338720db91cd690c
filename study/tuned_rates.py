"""Tuned learning rates: results/x/rates trains every arm at every rate, and results/x judges each arm at its best one.

Both are ordinary studies, whose arms have rates: B+LR=6e-4. rates/choice.json has the rate of each arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ra.arms import control_arms, parse_arm
from referee.verdict.statistics import mean
from runtime import records, run_record
from runtime.dotconfig import Symbols, parse_lines, quote
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.records import Count, Record, Text
from study import plan_file
from study.runs import DIVERGED, Run, read_runs
from study.study_settings import StudySettings

FOLDER, FILE = "rates", "choice.json"
AFTER = 1000  # tuning seeds lie this far above the first judged one: CONFIG_SEEDS is 1000 at most
NO_LOSS = ("no finite loss", "not admitted", DIVERGED)  # causes for which a run that ended has no loss


class Tuned(Record, frozen=True):
    """The chosen rate of an arm. losses: rate -> mean final validation loss in nats; None: a run has no finite loss."""

    rate: Text
    losses: Mapping[str, float | None]


class Choice(Record, frozen=True):
    """The content of choice.json. Its entries never change; arms that the study gains are added."""

    rates: tuple[Text, ...]  # ascending
    seeds: tuple[Count, ...]  # of the runs whose losses are averaged
    arms: Mapping[Text, Tuned]

    @property
    def names(self) -> dict[str, str]:
        """Arm -> the arm at its rate."""
        return {name: at_rate(name, one.rate) for name, one in self.arms.items()}

    @property
    def text(self) -> str:
        """The rates in one line."""
        arms: dict[str, list[str]] = {}
        for name, one in self.arms.items():
            arms.setdefault(one.rate, []).append(name)
        return "; ".join(f"{rate} for {', '.join(names)}" for rate, names in arms.items())


def at_rate(name: str, rate: str) -> str:
    """Return the name of an arm at a learning rate."""
    return parse_arm(name).with_rate(rate).name


def read_choice(study_dir: Path) -> Choice | None:
    """Return the choice; None before it. UserError where the file cannot be read."""
    try:
        return records.read(Choice, study_dir / FOLDER / FILE)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        raise UserError(f"{error}; fix: delete it, then run `make`, which reads the tuning runs") from error


def tuning_arms(variants: Iterable[str], rates: Sequence[str]) -> list[str]:
    """Return every arm at every rate."""
    return [at_rate(name, rate) for name in variants for rate in rates]


def judged_names(variants: Sequence[str], rates: Mapping[str, str]) -> list[str]:
    """Return every arm at its rate, and what separates the effect of an arm from that of its rate.

    These are the arm at the rate of the control arms, and the control arms at the rate of the arm.
    """
    names = [at_rate(name, rates[name]) for name in variants]
    if controls := control_arms(variants):
        names += [at_rate(name, rates[controls[0]]) for name in variants]
        names += [at_rate(name, rates[other]) for other in variants for name in controls]
    return list(dict.fromkeys(names))


def most_judged(variants: Sequence[str], rates: Sequence[str]) -> list[str]:
    """Return the arms of the judged study for the choice that needs most of them."""
    first, *others = rates
    judged = [name for name in variants if not parse_arm(name).is_control]
    guess = {name: others[place % len(others)] for place, name in enumerate(judged)}
    return judged_names(variants, dict.fromkeys(variants, first) | guess)


def tuning_study(settings: StudySettings, text: str) -> tuple[Symbols, str]:
    """Return the configuration of the study of rates. text: of .config."""
    return _with_values(
        text,
        STUDY_NAME=FOLDER,
        RESULTS_DIR=str(settings.directory),
        VARIANTS=" ".join(tuning_arms(settings.variants, settings.rates)),
        PRIMARY="",
        FIRST_SEED=settings.first_seed + AFTER,
        SEEDS=settings.tuning_seeds,
        LEARNING_RATES="",
    )


def judged_study(
    settings: StudySettings, text: str, names: Sequence[str], primary: str
) -> tuple[Symbols, str]:
    """Return the configuration of the study that judges these arms."""
    return _with_values(text, VARIANTS=" ".join(names), PRIMARY=primary, LEARNING_RATES="")


def _with_values(text: str, **values: str | int) -> tuple[Symbols, str]:
    """Return the configuration with other values of some symbols."""
    new = {
        f"CONFIG_{name}": quote(value) if isinstance(value, str) else value for name, value in values.items()
    }
    lines = [(line, line.partition("=")[0]) for line in text.split("\n")]
    changed = "\n".join(f"{symbol}={new[symbol]}" if symbol in new else line for line, symbol in lines)
    return Symbols(".config", parse_lines(changed, ".config")), changed


def choose(settings: StudySettings) -> Choice:
    """Write and return the choice with a rate for each arm: the lowest mean loss over the tuning seeds.

    The control arms share the mean over all of them. A rate is not eligible for an arm with a missing loss there.
    UserError for a run that does not count, for an arm without an eligible rate, and for other rates than before.
    """
    directory, known = settings.directory, read_choice(settings.directory)
    if known and known.rates != settings.rates:
        raise UserError(
            f"CONFIG_LEARNING_RATES is {' '.join(settings.rates)}; {directory / FOLDER / FILE} chose among "
            f"{' '.join(known.rates)}; fix: set another CONFIG_STUDY_NAME, or restore these rates in .config"
        )
    if known and set(settings.variants) <= set(known.arms):
        return known
    first = settings.first_seed + AFTER
    seeds = tuple(range(first, first + settings.tuning_seeds))
    runs = {run.name: run for run in read_runs(directory / FOLDER)}
    losses = {
        name: {
            rate: _mean([_loss(runs, at_rate(name, rate), seed) for seed in seeds]) for rate in settings.rates
        }
        for name in settings.variants
    }
    controls = control_arms(settings.variants)
    shared = {rate: _mean([losses[name][rate] for name in controls]) for rate in settings.rates}
    arms = dict(known.arms) if known else {}
    for name in (name for name in settings.variants if name not in arms):
        rate = ""
        if name in controls:
            rate = next((arms[other].rate for other in controls if other in arms), "")
        arms[name] = Tuned(rate or _lowest(name, shared if name in controls else losses[name]), losses[name])
    choice = Choice(settings.rates, seeds, arms)
    records.write(directory / FOLDER / FILE, choice, settings.name)
    print(f"learning rates chosen on seeds {', '.join(map(str, seeds))}: {choice.text}")
    return choice


def _loss(runs: Mapping[str, Run], name: str, seed: int) -> float | None:
    """Return the final loss of a tuning run; None where it has none, or was cut. UserError where it did not end."""
    run = runs.get(run_record.run_name(name, seed))
    if run and run.used:
        return None if run.record.truncated else run.value
    if run and run.cause in NO_LOSS:
        return None
    reason = run.why_not if run else "its record cannot be read"
    raise UserError(
        f"no learning rate is chosen, because {run_record.run_name(name, seed)} does not count: {reason}"
    )


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return mean(known) if known and len(known) == len(losses) else None


def _lowest(name: str, losses: Mapping[str, float | None]) -> str:
    eligible = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not eligible:
        raise UserError(
            f"{name} has no finite loss at any of CONFIG_LEARNING_RATES ({', '.join(losses)}); fix: use lower rates "
            "under another CONFIG_STUDY_NAME"
        )
    return min(eligible, key=lambda rate: eligible[rate])


def share_plan(study_dir: Path, names: Sequence[str]) -> None:
    """Write the judged study's plan.json with the batch and the counts of the study of rates, which has its arms."""
    plan = plan_file.read_valid(study_dir / FOLDER)
    if plan and not (study_dir / plan_file.FILE).exists():
        rows = {name: plan.variants[name] for name in names}
        started = plan.replace(study=study_dir.name, variants=rows, design=None, added={}, later_looks=())
        plan_file.write(study_dir, started)


def edge(rate: str, rates: Sequence[str]) -> str:
    """Return the next rate beyond the lowest or the highest, if the chosen one is at that edge; else ""."""
    beside = {rates[0]: rates[1], rates[-1]: rates[-2]}.get(rate)
    if not beside or float(rate) >= 1:
        return ""
    mantissa, exponent = f"{min(1.0, float(rate) ** 2 / float(beside)):.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
