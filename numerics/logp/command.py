"""`python -m numerics logp-diff A B`: compare log-probabilities of rollout and training (section 2.3.3.5)."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """
Compare the log-probabilities of the response tokens in two files (.npz, .npy, .json, .jsonl with log_probs and
response_mask): the mean over tokens and sequences of rollout - training. The exit status is 0 for every verdict; it
is 1 where a file cannot be used.
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add logp-diff to the commands of `python -m numerics`."""
    parser = commands.add_parser(
        "logp-diff", description=DESCRIPTION, help="compare rollout against training"
    )
    parser.add_argument("rollout", type=Path, metavar="A", help="log-probabilities of rollout (sampling)")
    parser.add_argument("training", type=Path, metavar="B", help="log-probabilities of training")
    parser.add_argument(
        "--threshold", type=float, default=0.01, help="of logp_diff and of a token (default 0.01)"
    )
    parser.add_argument("-o", "--output_path", type=Path, help="folder of logp_diff.json")
    parser.set_defaults(run=run_logp_diff)


def run_logp_diff(given: argparse.Namespace) -> int:
    from numerics.dump_files import write_json, writing
    from numerics.logp.files import compare_files
    from numerics.logp.report import as_json, report
    from pages.document import render_terminal

    found = compare_files(given.rollout, given.training, given.threshold)
    lines = [render_terminal(report(found))]
    if given.output_path:
        path = given.output_path / "logp_diff.json"
        with writing(path, "give another folder by -o"):
            write_json(path, as_json(found))
        lines.append(f"wrote {path}")
    print(*lines, sep="\n")
    return 0
