"""`python -m referee record FILE.py:FUNCTION`: record the last of the steps that a factory returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from referee.errors import NumericsError, described
from referee.numerics.record.record_settings import LEVELS, RecorderConfig

if TYPE_CHECKING:
    from referee.numerics.record.recorder import Recorder
    from referee.numerics.replayed_step import ReplayedStep

DESCRIPTION = """
Record the last of the steps that FUNCTION returns as (step, state), in OUT/step<number>. Two records are compared with
`python -m referee compare`.
"""
RECORDED = {  # TASK -> task and summary_mode of the recorder
    "statistics": ("statistics", "statistics"),
    "tensor": ("tensor", "statistics"),
    "hash": ("statistics", "md5"),
}


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("record", description=DESCRIPTION, help="record the tensors of a step")
    parser.add_argument("step", metavar="FILE.py:FUNCTION")
    parser.add_argument("-o", "--output_path", default="dump", help="folder of records")
    parser.add_argument("--level", choices=LEVELS, default="mix", help="modules, functions, or both")
    parser.add_argument("--task", choices=RECORDED, default="statistics", help="what is kept of a tensor")
    parser.set_defaults(run=run_record)


def run_record(given: Any) -> int:
    print(f"recorded: {record_factory(given.step, given.output_path, given.level, given.task)}")
    return 0


def record_factory(text: str, folder: str | Path, level: str = "mix", task: str = "statistics") -> Path:
    """Record the last step of FILE.py:FUNCTION. Returns the folder of the step."""
    from referee.numerics.record.recorder import Recorder
    from referee.numerics.replayed_step import load_replay

    recorder = Recorder(settings(folder, level, task))
    replay = load_replay(text)
    try:
        replay.advance()
        record_step(replay, recorder)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise NumericsError(f"the step fails: {described(error)}; fix: run it without numerics") from error
    recorder.step()
    return Path(folder) / f"step{replay.start + 1}"


def settings(folder: str | Path, level: str, task: str) -> RecorderConfig:
    kept, summary = RECORDED[task]
    return RecorderConfig(dump_path=str(folder), level=level, task=kept, summary_mode=summary)


def record_step(replay: ReplayedStep, recorder: Recorder) -> str:
    """Record the next step of a replay; `recorder.step()` writes it.

    Returns why the step is not finite, where it raises ArithmeticError; "" otherwise.
    """
    recorder.iteration, reason = replay.start + 1, ""
    try:
        recorder.start(replay.model)
        with replay.before_update(recorder.stop):
            replay.function()
    except ArithmeticError as error:
        reason = str(error).partition("; fix")[0] or described(error)
        recorder.note(reason)
    except BaseException:
        recorder.abort()
        raise
    return reason
