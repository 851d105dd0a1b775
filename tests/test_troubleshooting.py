"""docs/troubleshooting.md has every error and warning of the package, and no other.

The messages are read from the source: each text that is given to an exception or to a warning. A value in a text is
written as "…". A row of the page begins with the first words of a message. After messages have changed,
`python -m tests.test_troubleshooting` drops rows without a message, and adds rows for new messages to the last section.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "optimizer"
PAGE = ROOT / "docs" / "troubleshooting.md"
LAST = "## Further messages"
ROW = re.compile(r"^\| (`.+?`) \|.*\n", re.MULTILINE)
CALLED = re.compile(r"(?:Error|WrongRule|Warning|warn|warn_caller)$")  # names of exceptions, and functions that warn
LONGEST = 110  # characters of a new row's message
VALUE = "…"


# The source


@functools.cache
def messages() -> dict[str, str]:
    """{text of a message: "file:line"} of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for line, text in messages_of(ast.parse(source)) if re.search(r"raise |Error\(|warn", source) else ():
            found.setdefault(text, f"{path.relative_to(SOURCE).as_posix()}:{line}")
    return found


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each message in a module that has words of its own."""
    calls, assigned, returned = [], {}, {}  # values by (function, name); by the name of a function
    todo = [("", statement) for statement in tree.body]
    for inside, node in todo:  # grows on the way; statements only, since expressions are many
        value = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
        if isinstance(value, ast.Call) and CALLED.search(name_of(value.func)):
            calls.append((inside, value))
        if isinstance(node, ast.Assign):
            assigned.setdefault((inside, name_of(node.targets[0])), []).append(value)
        elif isinstance(node, ast.Return) and value:
            returned.setdefault(inside, []).append(value)
        inside = node.name if isinstance(node, ast.FunctionDef) else inside
        for part in ("body", "handlers", "orelse", "finalbody"):
            todo += [(inside, child) for child in getattr(node, part, ())]
    known = {**{name: values for (inside, name), values in assigned.items() if not inside}, **returned}
    for inside, call in calls:
        local = {name: values for (function, name), values in assigned.items() if function == inside}
        for argument in call.args[:2]:
            for text in texts_of(argument, {**known, **local}):
                if len(re.findall(r"[a-z]{2,}", text)) > 1:
                    yield call.lineno, text


def name_of(node: ast.expr) -> str:
    """The last part of a name with dots, "" for other expressions."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def texts_of(node: ast.expr, known: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The texts that an argument of an exception may have: a literal, a name, or a call of a function of the module."""
    name = node.func if isinstance(node, ast.Call) else node
    name = name.value if isinstance(name, ast.Attribute) and name.attr == "format" else name
    if isinstance(name, ast.Name):
        for value in known.get(name.id, ()):
            if isinstance(value, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                yield re.sub(r"\{\}", VALUE, rendered(value, known))
    elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
        yield rendered(node, known)


def rendered(node: ast.expr, known: dict[str, list[ast.expr]]) -> str:
    """A text with "…" for each value; constants of the module are written out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return re.sub(f"{VALUE}+", VALUE, "".join(rendered(part, known) for part in node.values))
    if isinstance(node, ast.BinOp):
        return rendered(node.left, known) + rendered(node.right, known)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id.isupper():
        value = known.get(node.value.id, [node])[0]
        return rendered(value, known) if isinstance(value, (ast.Constant, ast.JoinedStr)) else VALUE
    return VALUE


# The page


def entries() -> list[str]:
    """The messages in the first cells of the page's rows."""
    return [entry for row in ROW.finditer(PAGE.read_text(encoding="utf-8")) for entry in entries_of(row[1])]


def entries_of(cell: str) -> list[str]:
    """Several messages of one cell are apart by <br>; a message with backquotes stands in two backquotes."""
    return [re.fullmatch(r"(`+ ?)(.+?)\1?`*", part)[2].rstrip(" `") for part in cell.split("<br>")]


def entry_of(text: str, listed: Iterable[str]) -> str | None:
    """The longest entry with which a message begins."""
    return max((entry for entry in listed if text.startswith(entry)), key=len, default=None)


def test_the_page_has_every_message():
    """Run `python -m tests.test_troubleshooting` for rows of the missing messages, and say what each means."""
    listed = entries()
    assert [f"{where}: {text}" for text, where in messages().items() if entry_of(text, listed) is None] == []


def test_every_row_of_the_page_is_a_message():
    listed = entries()
    assert len(listed) == len(set(listed)) > 300
    assert re.findall(r"^\| .+ \| *\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == []  # each says what to do
    assert set(listed) - {entry_of(text, listed) for text in messages()} == set()


def test_messages_are_read_in_every_form():
    tree = ast.parse('''
TEXT = "the text of a {}"
WHY = "a reason"
def fault(x): return f"{x} is a fault"
def f(x):
    found = f"a local text of {x}"
    raise ValueError(f"{x} and {x}{x} are wrong: {WHY}")
    raise TypeError("one " "literal")
    raise NotImplementedError(TEXT.format(x))
    raise ValueError(fault(x))
    raise OSError(1, "a second argument")
    warn_caller(found)
    raise RuntimeError(f"{x}: {x}") from None
    raise
''')
    assert [text for _, text in messages_of(tree)] == [
        "… and … are wrong: a reason", "one literal", "the text of a …", "… is a fault", "a second argument",
        "a local text of …"]


def first_words(text: str) -> str:
    """The beginning of a message, as a row says it."""
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0]


def update() -> None:
    """Drop entries without a message from the page, and append rows for new messages."""
    page, known, listed = PAGE.read_text(encoding="utf-8"), messages(), entries()
    used = {entry_of(text, listed) for text in known}

    def kept(row: re.Match) -> str:
        parts = [part for part, entry in zip(row[1].split("<br>"), entries_of(row[1])) if entry in used]
        return row[0].replace(row[1], "<br>".join(parts)) if parts else ""

    page = ROW.sub(kept, page)
    new = [first_words(text.partition("\n")[0]) for text in known if entry_of(text, listed) is None]
    if new:
        quoted = [f"`` {text} ``" if "`" in text else f"`{text}`" for text in dict.fromkeys(new)]
        head = "" if LAST in page else f"\n{LAST}\n\n| message | what it means, and what to do |\n|---|---|\n"
        page += head + "".join(f"| {text} | |\n" for text in quoted)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    update()
