"""`MemoryReport`, the result of `Muon.memory_report` and `Muon.memory_forecast`, and its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ..report import as_bytes

OPTIMIZER_KINDS = ("state", "workspace", "tables", "graphs", "temporary")
KINDS = ("weights", "gradients", *OPTIMIZER_KINDS)
HEADS = ("kind", "what", "where", "this rank", "largest rank")
# (kind, what, group, dtype, where) of a row
Key = tuple[str, str, int | None, str | None, str]
SLOT_ROW: Key = ("workspace", "slots of offloaded state", None, None, "device")
TABLES: Key = ("tables", "addresses and shapes", None, None, "device")
COPIES: Key = ("temporary", "temporaries of elementwise rules", None, None, "device")


@dataclass(frozen=True)
class MemoryRow:
    """A line of a `MemoryReport`."""

    kind: str  # one of KINDS
    what: str  # key of the state, name of the buffer, or what is held
    group: int | None  # number of the parameter group; None: of no single group
    dtype: str | None  # as "float32"; None: of several
    where: str  # "device": with the parameters; "host"
    nbytes: int  # on this rank
    largest_nbytes: int  # on the rank with the largest total

    def cells(self) -> list[str]:
        """The cells of the row as text, in the order of HEADS."""
        group = "" if self.group is None else f", group {self.group}"
        dtype = "" if self.dtype is None else f", {self.dtype}"
        sizes = map(as_bytes, (self.nbytes, self.largest_nbytes))
        return [self.kind, f"{self.what}{group}{dtype}", self.where, *sizes]


@dataclass(frozen=True)
class MemoryReport:
    """The result of `Muon.memory_report` and `Muon.memory_forecast`; `str(report)` is a table."""

    rank: int  # this rank
    largest_rank: int  # the rank with the largest total, by the plan
    rank_count: int  # ranks that the plan knows of
    is_measured: bool  # bytes of this rank are those of tensors that exist
    rows: tuple[MemoryRow, ...]

    def bytes_of(self, *kinds: str, where: str | None = None, largest: bool = False) -> int:
        """Bytes of this rank, or of the largest rank, in rows of `kinds` (none: all kinds) and of
        `where` (None: device and host).
        """
        rows = [row for row in self.rows if not kinds or row.kind in kinds]
        rows = [row for row in rows if where in (None, row.where)]
        return sum(row.largest_nbytes if largest else row.nbytes for row in rows)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank, without weights and gradients."""
        return self.bytes_of(*OPTIMIZER_KINDS)

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank, with weights and gradients."""
        return self.bytes_of()

    def as_dict(self) -> dict:
        """The report as a dict of numbers and texts, for logs: {kind: {"device", "host",
        "largest device", "largest host": bytes}}, the fields of the report, and "rows".
        """
        found = {
            kind: {
                f"{'largest ' * largest}{where}": self.bytes_of(kind, where=where, largest=largest)
                for largest in (False, True)
                for where in ("device", "host")
            }
            for kind in KINDS
        }
        return {**found, **asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """The table, and below it the sums."""
        table = [HEADS, *(row.cells() for row in self.rows)]
        for name, kinds in (("optimizer", OPTIMIZER_KINDS), ("with weights and gradients", KINDS)):
            for where in ("device", "host"):
                sizes = [self.bytes_of(*kinds, where=where, largest=most) for most in (False, True)]
                table.append(["sum", name, where, *map(as_bytes, sizes)])
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in table
        ]
        how = "measured" if self.is_measured else "predicted"
        head = (
            f"memory of rank {self.rank}, {how}; the largest of {self.rank_count} ranks is rank "
            f"{self.largest_rank}, predicted"
        )
        return "\n".join([head, *lines])


def row_key(
    kind: str, what: str, group: int | None, dtype: torch.dtype | None, where: str = "device"
) -> Key:
    """Return the key of a row."""
    return kind, what, group, None if dtype is None else str(dtype).removeprefix("torch."), where
