"""Keys that get into groups after construction. Keys that were written between steps are checked as
at construction. A state dict cannot change arguments of the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat

from ...rules.elementwise import DTYPE_KEY
from ..errors import in_group, label_of, shortened, warn_caller
from .group_keys import CHANGED, check_keys, is_same
from .rule_options import unread_options

# Keys of groups of torch's AdamW, and of groups with use_muon=False
USUAL = "capturable", DTYPE_KEY


class LiveKeys:
    """Checks groups again after their keys, or the values of fixed keys, have changed.

    Fixed keys may have one value only: arguments of the optimizer, and keys of CHANGED. Without
    changes `check` compares keys and fixed values, in C, and reads no other value.
    """

    def __init__(self) -> None:
        """Begin without groups; `add` takes each new group."""
        # Keys of each group at the last check; None: the next check looks at all groups
        self._keys: list[tuple] | None = None
        # id of a group -> keys of the last check, or of `accept`
        self._known: dict[int, tuple] = {}
        self._fixed: list[str] = []  # fixed keys that some group has
        self._values: list = []  # of `_fixed` and "use_muon", by key and group
        self._warned: set[str] = set()  # options of other rules, of which a warning has told

    def add(
        self, number: int, group: dict, given: Collection[str], written: Mapping[str, object]
    ) -> None:
        """Accept a new group, which construction has checked, and warn of options of other rules.
        `given`: the keys that the user gave. `written`: as in `unread_options`.
        """
        # If all keys of a group were given, another optimizer of this class has made the group
        known = given if group.keys() <= set(given) else ()
        self._warn_of_unread(number, group, known, written)
        self.accept([group])

    def accept(self, groups: Sequence[dict]) -> None:
        """Accept all keys of new, loaded or copied groups: state dicts may have keys of other
        tools. The next check checks only the fixed keys among these.
        """
        self._keys = None
        self._known.update(zip(map(id, groups), map(tuple, groups)))

    def check(
        self,
        groups: Sequence[dict],
        extra_keys: Collection[str],
        arguments: Callable[[], Mapping[str, object]],
        written: Callable[[], Mapping[str, object]],
    ) -> None:
        """Raise ValueError, with group and key, for a key without effect where the user probably
        expects an effect; warn of options of other rules. `extra_keys`, `arguments`: as in
        `check_keys`; `written`: as in `unread_options`. Both are called after changes only.
        """
        keys = list(map(tuple, groups))
        # Identity: a comparison of arrays has no truth value
        if keys == self._keys and (
            not self._fixed or all(map(operator.is_, self._values_of(groups), self._values))
        ):
            return
        given, made = arguments(), written()
        # A group whose dict was replaced has no known keys of its own: the keys of any group pass
        anywhere = set().union(*self._known.values())
        for number, group in enumerate(groups):
            known = self._known.get(id(group), anywhere)
            with in_group(number, group):
                if "use_muon" not in group:
                    raise ValueError(
                        "the key use_muon is missing: set it again, to True where the group's "
                        "matrices are orthogonalized, else to False"
                    )
                check_keys(group, extra_keys, given, known)
            self._warn_of_unread(number, group, known, made)
        self._keys = keys
        self._known = dict(zip(map(id, groups), keys))
        present = set().union(*keys)
        self._fixed = [key for key in (*given, *CHANGED) if key in present]
        self._values = self._values_of(groups)

    def _warn_of_unread(
        self, number: int, group: dict, known: Collection[str], written: Mapping[str, object]
    ) -> None:
        """Warn of each option of another rule, once for each key, not once for each group."""
        for key, own, owners in unread_options(group, known, written):
            if key not in self._warned:
                self._warned.add(key)
                warn_caller(
                    f"{label_of(number, group)} has {key}={shortened(repr(group[key]))}, which its "
                    f"rule {own!r} does not read: it is an option {owners}. Set the rule of the "
                    "group, or remove the key"
                )

    def _values_of(self, groups: Sequence[dict]) -> list:
        """The values of `_fixed`, and of "use_muon", which decides what is a key of a group."""
        return [
            value
            for key in (*self._fixed, "use_muon")
            for value in map(dict.get, groups, repeat(key))
        ]


def warn_of_saved_arguments(
    saved: Sequence[Mapping], arguments: Sequence[str], options: Sequence[object]
) -> None:
    """Warn of the first of `arguments` that a group of a state dict has with another value than the
    optimizer: the saved value has no effect. `options`: of each group of the optimizer; `arguments`
    are equal in all groups.
    """
    for number, group in enumerate(saved if options else ()):
        for key in [key for key in arguments if key in group and key not in USUAL]:
            own = getattr(options[0], key)
            if not is_same(group[key], own):
                return warn_caller(
                    f"group {number} of the state dict has {key}={shortened(repr(group[key]))}, an "
                    f"argument of the optimizer, which loading does not change: it stays "
                    f"{shortened(repr(own))}. To change it, build the optimizer with it, else "
                    "remove the key from the saved group"
                )
    return None
