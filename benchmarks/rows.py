"""The CSV tables that the scripts here append their rows to, and read them from."""

from __future__ import annotations

import argparse
import csv
import subprocess
from pathlib import Path


def append(path, columns, rows) -> None:
    """Add rows, dicts, to a table; one that is new or empty gets its folder and a header. Lines end in LF everywhere,
    or tables that were continued on another machine would differ in every line.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def read(path) -> list[dict[str, str]]:
    """All rows, as text."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def add_output(parser, columns, name: str) -> None:
    """Add the options --out, a table with these columns or none yet, which is told before anything is measured, and
    --commit.
    """
    parser.add_argument("--commit", default=_commit(), help="what to write as the commit (default: git's)")
    parser.add_argument("--out", type=table(columns), default=name, help="CSV to append to (default: %(default)s)")


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        found = ""
    return found or "unknown"


def table(columns):
    """The `type` of an option for a table with these columns, or none yet."""
    def checked(text: str) -> Path:
        if Path(text).exists():
            with open(text, newline="") as file:
                header = next(csv.reader(file), [])
            if header not in ([], list(columns)):
                raise argparse.ArgumentTypeError(f"{text} has other columns; name a new file")
        return Path(text)

    return checked
