"""Errors for the user, and the one place that prints them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from gpt2.system.resource_errors import disk_full, explain_full_disk
from gpt2.system.stdout import LastingOutput, open_missing, printable
from referee.errors import UserError as UserError

INTERRUPTED = 130
STREAMS = ("<stdout>", "<stderr>")  # their names in an OSError


def one_line(error: BaseException) -> str:
    """Return the error's text in one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def first_sentences(error: BaseException, most: int = 300) -> str:
    """Return the type of the error and the sentences of its text that fit into `most` characters, at least one."""
    first, *others = re.split(r"(?<=[.!?])\s+", one_line(error))
    for sentence in others:
        if len(first) + len(sentence) >= most:
            break
        first = f"{first} {sentence}"
    name = type(error).__name__
    return name if first == name else f"{name}: {first.removesuffix('.')}"


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status. An error for the user becomes one line on stderr and status 1.

    So does an OSError that names a file, such as a folder in place of a file, or a file without permissions.
    Ctrl-C becomes one line and status INTERRUPTED, as in a shell.
    Everything that the command prints is escaped. It continues when the reader of its output ends, as in
    `make memory | head`.
    """
    open_missing()
    out, err = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
        try:
            status = main()
            sys.stdout.flush()  # may meet a full disk
        except UserError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            status = 1
        except OSError as error:
            number, name = disk_full(error), error.filename2 or error.filename
            if name in STREAMS:
                fact, fix = (
                    f"{name} cannot be written: {error.strerror}",
                    "redirect it to a disk with free space",
                )
            elif number:
                fact, fix = explain_full_disk(number, Path(name or "."))
            elif isinstance(name, str):
                fact = f"{name} cannot be used: {error.strerror}"
                fix = "correct its permissions, or move it away if another file or folder belongs there"
            else:
                raise
            print(f"error: {printable(fact)}; fix: {fix}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            status = INTERRUPTED
        finally:
            sys.stdout.flush()  # the last lines too may meet a closed pipe
    sys.exit(status or 0)
