"""`make demo`: a study of a tiny model with a known result, in two to three minutes on two idle cores.

It runs the study of defconfigs/demo on the CPU, in results/demo, and explains each verdict. It reads and changes no
.config.
"""

from __future__ import annotations

from pathlib import Path

from runtime.detected_hardware import detected_target_name
from runtime.errors import run_command
from runtime.settings import Config
from study import kconfig_rules
from study.analysis.verdict import BETTER, CANNOT_TELL, EQUIVALENT, WORSE
from study.kconfig_commands import configure, read_layers
from study.make_arguments import refuse_assignments
from study.report.report_data import build_report
from study.report.report_summary import numbers
from study.study_settings import StudySettings

ARMS = {
    "NOPE": "no position embedding",
    "B+WD=0.1": "the weight decay of the baseline, written as a modifier: no change",
    "RALEARN": "a learned mix of standard and reciprocal attention",
}
MEANINGS = {
    WORSE: "the difference is too large for chance; the interval excludes zero",
    BETTER: "the difference is too large for chance; the interval excludes zero",
    EQUIVALENT: "the 90 % interval lies within the margin, so the arms differ by less than that",
    CANNOT_TELL: "the interval contains zero and exceeds the margin; there may be a difference",
}


def main() -> int:
    refuse_assignments()
    tree = kconfig_rules.load_kconfig(detected_target_name())
    symbols = configure(tree, read_layers("demo"), [])
    text = kconfig_rules.render(tree)
    settings, config = StudySettings.from_symbols(symbols), Config.from_symbols(symbols)
    print(
        f"demo: {len(settings.variants)} arms x {settings.seeds} seeds of a {config.model.size} model, "
        f"{config.budget.text} a run; .config is not used",
        flush=True,
    )
    from study.study import Study

    study = Study(symbols, text)
    status = study.run()
    if status:
        print("`make demo` continues it")
        return status
    explain(study.directory)
    return 0


def explain(directory: Path) -> None:
    """Print each verdict with its number and its meaning, and the next commands."""
    print("\nThe verdicts")
    for verdict in build_report(directory).verdicts:
        print(f"- {verdict.variant} ({ARMS[verdict.variant]}): {verdict.word}; {numbers(verdict)}")
        print(f"  {verdict.word}: {MEANINGS[verdict.word]}")
    print(
        f"Open {directory / 'report.html'} in a browser. The real study: make defconfig-gpt2-ra-ablation && make"
    )


if __name__ == "__main__":
    run_command(main)
