"""Parts of documents that scripts here write from their CSV, and the dates of commits in docs/log.md.

A part begins with the line "<!-- begin NAME -->" and ends with "<!-- end NAME -->".
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write_parts(path: Path, parts: dict[str, list[str]]) -> None:
    """Write the parts {name: lines} of a document anew. SystemExit, before any change, if it lacks one of them."""
    text = path.read_text(encoding="utf-8")
    for name, lines in parts.items():
        begin, end = span(path, text, name)
        text = "".join((text[:begin], "\n", *(f"{line}\n" for line in lines), "\n", text[end:]))
    path.write_text(text, encoding="utf-8")


def part(path: Path, name: str) -> list[str]:
    """The lines of a part. SystemExit if the document lacks it."""
    text = path.read_text(encoding="utf-8")
    begin, end = span(path, text, name)
    return text[begin:end].strip("\n").split("\n")


def span(path: Path, text: str, name: str) -> tuple[int, int]:
    """Where a part begins and ends, without its marks."""
    marks = [f"<!-- {edge} {name} -->\n" for edge in ("begin", "end")]
    if [text.count(mark) for mark in marks] != [1, 1]:
        raise SystemExit(f"{path} needs each of these lines once: {', '.join(mark.strip() for mark in marks)}")
    return text.index(marks[0]) + len(marks[0]), text.index(marks[1])


def dates(log: Path = DOCS / "log.md") -> dict[str, str]:
    """{commit: date of the newest entry of the log that names it as its commit}."""
    found = {}
    for entry in re.split(r"^## ", log.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        commits = re.search(r"^- Commit: (.*)$", entry, re.MULTILINE)
        for commit in re.findall(r"\b[0-9a-f]{7,}\b", commits[1] if commits else ""):
            found.setdefault(commit, entry[:10])
    return found
