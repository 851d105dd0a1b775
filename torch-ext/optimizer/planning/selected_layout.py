"""Layouts of matrices of which only some rows or columns are orthogonalized, see `Selection`.

Where every rank can select by itself, a `SelectedLayout` counts selected rows and columns only:
plans, buffers and all-to-alls are those of the smaller matrices. Else matrices are sent whole, and
their owners select. Results are equal to the last bit. Touches no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..newton_schulz.selection import Block, Selection
from ..params.layout import Layout, UnitBox


@dataclass(frozen=True)
class SelectedLayout(Layout):
    """A layout whose matrices are selected from. `boxes`, `shape` and starts of boxes are those of
    the tensor as stored.

    `at_source`: ranks select from the pieces that they store, and send selected rows or columns.
    `axes`: of each unit, 0 if rows are selected, 1 if columns are; None: the tensor is state
    without numbers along that side, and not selected from.
    """

    selection: Selection = Selection(1.0)
    axes: tuple[int | None, ...] = ()
    at_source: bool = False

    @property
    def sends_parts(self) -> bool:
        """See `Layout.sends_parts`."""
        return self.at_source

    @functools.cached_property
    def whole_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each unit as stored."""
        return [self.shape[-2:]] if self.cut_into is None else self.cut_into.shapes()

    @functools.cached_property
    def unit_shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each unit as sent to its owner."""
        return self._parts if self.at_source else self.whole_shapes

    @functools.cached_property
    def selected_shapes(self) -> list[tuple[int, int] | None]:
        """Shape of the part of each unit that its owner selects; None: the whole unit."""
        return [None] * self.unit_count if self.at_source else self._parts

    @functools.cached_property
    def _parts(self) -> list[tuple[int, int]]:
        """(rows, columns) of the selected part of each unit."""
        return [
            tuple(sum(n for _, _, n in self.blocks(unit)) if d == axis else size[d] for d in (0, 1))
            for unit, (size, axis) in enumerate(zip(self.whole_shapes, self.axes))
        ]

    def blocks(self, unit: int) -> list[Block]:
        """Blocks of the rows or columns of a unit, see `Selection.blocks_of`."""
        return self.selection.blocks_of(self.whole_shapes[unit][self.axes[unit]])

    def _cut_boxes(self, rank: int) -> dict[int, list[UnitBox]]:
        """unit -> boxes stored by `rank`, in selected rows and columns with `at_source`."""
        whole = super()._cut_boxes(rank)
        if not self.at_source:
            return whole
        return {
            unit: [(self._part_of(unit, box), start) for box, start in boxes]
            for unit, boxes in whole.items()
        }

    def _part_of(self, unit: int, box: tuple) -> tuple:
        """The selected rows or columns of a box, numbered in the selected part of the unit."""
        axis = self.axes[unit]
        if axis is None:
            return box
        start, stop = box[axis]
        blocks = self.blocks(unit)
        first = sum(count for a, _, count in blocks if a < start)
        side = first, first + sum(count for a, _, count in blocks if start <= a < stop)
        return (side, box[1]) if axis == 0 else (box[0], side)

    @functools.cached_property
    def _whole_boxes(self) -> dict[int, dict[int, list[UnitBox]]]:
        """Cache: rank -> unit -> boxes as stored."""
        return {}

    def whole_boxes(self, rank: int, unit: int) -> list[UnitBox]:
        """`unit_boxes` as stored."""
        if rank not in self._whole_boxes:
            self._whole_boxes[rank] = super()._cut_boxes(rank)
        return self._whole_boxes[rank].get(unit, [])

    def stored_shapes(self, rank: int, unit: int) -> list[tuple[int, int]]:
        """(rows, columns) of each of `whole_boxes`."""
        return [(r1 - r0, c1 - c0) for ((r0, r1), (c0, c1)), _ in self.whole_boxes(rank, unit)]

    def whole_box(self, rank: int, unit: int, start: tuple[int, int]) -> tuple:
        """The stored box that begins at (row, column) `start` of the matrix."""
        return next(box for box, at in self.whole_boxes(rank, unit) if at == start)

    def whole_shape(self, rank: int, unit: int, start: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of `whole_box`."""
        return tuple(stop - first for first, stop in self.whole_box(rank, unit, start))

    def blocks_at(
        self, rank: int, unit: int, start: tuple[int, int]
    ) -> tuple[int, tuple[Block, ...]]:
        """(0 if rows are selected, 1 if columns are; blocks inside `whole_box`)."""
        axis = self.axes[unit]
        first, stop = self.whole_box(rank, unit, start)[axis]
        blocks = [(a - first, b - first, n) for a, b, n in self.blocks(unit) if first <= a < stop]
        return axis, tuple(blocks)

    def can_select_at_source(self) -> bool:
        """Whether every stored box consists of whole blocks, over the full length of the other
        side: then a rank can select from the box alone.
        """
        for unit, axis in enumerate(self.axes):
            blocks = self.blocks(unit)
            starts, stops = {a for a, _, _ in blocks}, {b for _, b, _ in blocks}
            other = (0, self.whole_shapes[unit][1 - axis])
            boxes = {box for rank in self.ranks for box, _ in self.whole_boxes(rank, unit)}
            if any(
                box[axis][0] not in starts or box[axis][1] not in stops or box[1 - axis] != other
                for box in boxes
            ):
                return False
        return True


def select(
    layouts: Sequence[Layout], selection: Selection, may_send_parts: bool
) -> list[SelectedLayout]:
    """Return the layouts of matrices with a selection. `may_send_parts`: ranks select from what
    they store, where they can.
    """
    known = {}
    for layout in layouts:
        if id(layout) not in known:
            axes = tuple(selection.axis(*shape) for shape in layout.unit_shapes)
            found = _with(layout, selection, axes, False)
            if may_send_parts and found.can_select_at_source():
                found = _with(layout, selection, axes, True)
            known[id(layout)] = found
    return [known[id(layout)] for layout in layouts]


def select_state(
    layouts: Sequence[Layout], matrices: Sequence[SelectedLayout], per: str
) -> list[SelectedLayout]:
    """Return the layouts of state, with the selection of the matrices. `per`: as in `State`."""
    known = {}
    has = {"element": (0, 1), "row": (0,), "column": (1,), "matrix": ()}[per]
    for layout, of in zip(layouts, matrices):
        key = id(layout), id(of)
        if key not in known:
            axes = tuple(axis if axis in has else None for axis in of.axes)
            known[key] = _with(layout, of.selection, axes, of.at_source)
    return [known[id(layout), id(of)] for layout, of in zip(layouts, matrices)]


def _with(layout: Layout, selection: Selection, axes: tuple, at_source: bool) -> SelectedLayout:
    """Return a layout with a selection."""
    own = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return SelectedLayout(**own, selection=selection, axes=axes, at_source=at_source)
