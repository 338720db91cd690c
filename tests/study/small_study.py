"""A study of very small runs in this process."""

import dataclasses
from pathlib import Path

from referee.verdict.design import MARGIN, Design
from runtime.batch_plan import plan_batch
from runtime.settings import Config
from study import plan_file
from study.plan_file import Plan, PlanBudget, PlanRow
from study.study_settings import StudySettings
from tests import small_runs
from tests.checked_files import write_checked

TOKENS = 4 * 16  # of an iteration
TEXT = "CONFIG_SCHEDULE_WSD=y\nCONFIG_GPT2_MAX_ITERS=10\nCONFIG_GPT2_MAX_TIME=0\nCONFIG_SEEDS=1\n"
FIRST, WARMUP = 10, 2  # iterations, of the warm-up


def configuration(texts: Path) -> Config:
    return small_runs.configuration(texts, FIRST, schedule=("wsd", 0.3))


class Place:
    """A study in a folder, its runs made in this process as scripts.train makes them."""

    def __init__(self, folder: Path, config: Config, names: tuple[str, ...]) -> None:
        self.config, self.settings = config, StudySettings("s", names, 1, folder, False)
        self.directory = folder / "s"
        self.directory.mkdir(parents=True)
        (self.directory / "config").write_text(TEXT)
        expected = {"variants": list(names), "seeds": 1}
        write_checked(self.directory / "expected.json", expected)
        plan = Plan(
            batch=plan_batch(4, 2, 1, 16),
            budget=PlanBudget(**dataclasses.asdict(config.budget)),
            design=Design(names[:1], names[1:], names[-1], (0,), (1,), MARGIN).hashed,
            variants={
                name: PlanRow("any", FIRST, FIRST * TOKENS, warmup_iterations=WARMUP) for name in names
            },
        )
        plan_file.write(self.directory, plan)

    def plan(self) -> Plan:
        plan = plan_file.read(self.directory)
        assert plan
        return plan

    def folder(self, name: str = "B") -> Path:
        return self.directory / "runs" / f"{name}0"

    def run(self, name: str = "B") -> str:
        plan = self.plan()
        row = plan.variants[name]
        planned = {
            "iterations": row.iterations,
            "warmup_iterations": row.warmup_iterations,
            "batch": plan.batch,
        }
        return small_runs.start(self.folder(name), self.config, name, **planned).train()
