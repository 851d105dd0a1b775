"""Dion's `num_heads` and `split_sizes`: the `split` of this package, and the row state of blocks.

`split_of` translates the options of a group, `with_unscaled_rows` the state of NorMuon. For the
conversion of whole state dicts in convert.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...communication.redistribute import place_like
from ...params.errors import during, shortened
from ...params.units import parse

OfState = Callable[[dict], dict]  # converts the state of a parameter


def split_of(where: str, group: dict) -> dict | None:
    """Return `split` for Dion's `num_heads` or `split_sizes`; None if a matrix is one unit. Raises
    TypeError or ValueError for a value that is no split.
    """
    heads = group.get("num_heads")
    sizes = group.get("split_sizes")
    if heads in (None, 1) and sizes is None:
        return None
    if heads not in (None, 1) and sizes is not None:
        raise ValueError(
            f"{where} has num_heads={shortened(repr(heads))} and split_sizes="
            f"{shortened(repr(sizes))}, which exclude each other in Dion's package: remove one"
        )
    form = {"heads": heads} if sizes is None else {"rows": sizes}
    with during(f"{where}, in num_heads or split_sizes"):
        parse(form)
    return form if sizes is None else {"rows": list(sizes)}


def with_unscaled_rows(
    where: str, sizes: Sequence[int], adjust_lr: str, of_state: OfState
) -> OfState:
    """Return `of_state`, followed by a division of NorMuon's row state by the squared scales of its
    blocks. A scale is the learning rate of a block over the rate of the whole matrix. Dion scales
    updates before the mean squares are taken, this package afterwards.
    """

    def converted(state: dict) -> dict:
        """Convert a state of a matrix that is stepped in blocks of rows. Raises ValueError if the
        sizes of the blocks do not add up to its rows.
        """
        found = of_state(state)
        R, C = found["momentum_buffer"].shape
        if sum(sizes) != R:
            raise ValueError(
                f"{where} has split_sizes={shortened(list(sizes))}, which add up to {sum(sizes)} "
                f"rows, and a parameter of {R} rows: the state dict is damaged"
            )
        if "second_moment" in found:
            # Scales are sqrt(rows / columns), or 0.2 sqrt(max(rows, columns))
            is_rms = adjust_lr == "rms_norm"
            squares = [max(n, C) / max(R, C) if is_rms else n / R for n in sizes]
            on = found["second_moment"].device
            rows = torch.tensor(squares, dtype=torch.float64, device=on)
            rows = rows.repeat_interleave(torch.tensor(sizes, device=on))
            rows = place_like(rows.float().view(R, 1), found["second_moment"])
            found["second_moment"] = found["second_moment"].float() / rows
        return found

    return converted
