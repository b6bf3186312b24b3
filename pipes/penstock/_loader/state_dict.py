"""Checks on saved states that need no graph, and the ledger of committed batches."""

from __future__ import annotations

import json
import logging
import warnings
from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, final

from penstock._arguments import whole_number
from penstock._errors import StateError
from penstock._fetch.dataset_facts import SHARD_NAMES, SUBSET_INDICES
from penstock._nodes.node import epoch_of

if TYPE_CHECKING:
    from penstock._nodes.node import State


_logger = logging.getLogger("penstock")

FORMAT = 1
"""The version of the saved state's layout. It changes when an older state could no longer be read correctly."""

KEY = "penstock"
"""The one key of `Loader.state_dict`."""

SEEDS: Final = ("sample_seed", "stream_seed")
"""The settings that are seeds of random numbers. They are compared if both graphs have a node that is seeded by
them.
"""


@final
class CommitLedger:
    """Which delivered batches were trained on; see `Loader.commit`.

    Until `commit` is first called, every delivered batch counts.

    Attributes:
        committed: The state after the last batch that was; None: `commit` was never called, so there is nothing to tell
            this object.
    """

    def __init__(self) -> None:
        self.committed: State | None = None
        self._uncommitted: deque[State] = deque()

    def state_of(self, delivered: State) -> State:
        """The state after the last committed batch; ``delivered`` if nothing was ever committed."""
        return delivered if self.committed is None else self.committed

    def delivered(self, state: State) -> None:
        """A batch was delivered; ``state`` is the position after it."""
        self._uncommitted.append(state)

    def saved(self) -> tuple[State, list[State]] | None:
        """A copy for `restore`; None if `commit` was never called."""
        return None if self.committed is None else (self.committed, list(self._uncommitted))

    def restore(self, saved: tuple[State, list[State]] | None) -> None:
        """Undo everything since `saved`."""
        if saved is not None:
            self.committed, self._uncommitted = saved[0], deque(saved[1])

    def commit(self, n: int, now: State) -> None:
        """``n`` more of the delivered batches were trained on; ``now`` is the position after the last delivered one."""
        n = whole_number("commit(n)", n, 0)
        if self.committed is None and n != 0:
            raise ValueError(
                f"commit({n!r}): call commit(0) once before the first batch; from then on state_dict() refers to the "
                f"last committed batch."
            )
        if self.committed is None:
            self.committed = now
        if not 0 <= n <= len(self._uncommitted):
            raise ValueError(
                f"commit({n!r}): only {len(self._uncommitted)} batches were delivered and not yet committed."
            )
        for _ in range(n):
            self.committed = self._uncommitted.popleft()

    def forget(self, now: State) -> None:
        """Drop batches that were delivered but not committed, because the loader was moved or the epoch was skipped."""
        self._uncommitted.clear()
        if self.committed is not None:
            self.committed = now


def parsed(state_dict: Any) -> dict[str, Any]:
    """The JSON of a saved state, checked as far as possible without the graph."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(KEY), str):
        came = (
            f"a dict with the keys {list(state_dict)!r:.200}"
            if isinstance(state_dict, Mapping)
            else type(state_dict).__name__
        )
        raise StateError(
            f"a penstock state is a dict with the single key {KEY!r} and a JSON string as its value, but {came} came. "
            f"Save what loader.state_dict() returns. (A state of another loader, such as torchdata's, cannot be "
            f"loaded: switch at the end of an epoch, with loader.set_epoch.)"
        )
    text = state_dict[KEY]
    try:
        state = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise StateError(
            f"the text of this state is not JSON ({exc}): {text!r:.80}. It is damaged; load an older one."
        ) from exc
    if not isinstance(state, dict) or state.get("format") != FORMAT or isinstance(state.get("format"), bool):
        number = state.get("format") if isinstance(state, dict) else state
        raise StateError(f"this state has format {number!r:.80}, but this version of penstock reads format {FORMAT}.")
    for key in ("settings", "state"):
        if not isinstance(state.get(key), dict):
            raise StateError(f"this state has no {key!r}: it is damaged; load an older one.")
    return state


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def epoch_in(state: State) -> int:
    try:
        epoch = epoch_of(state)
    except (KeyError, TypeError) as exc:
        raise StateError("this state has no 'epoch': it is damaged; load an older one.") from exc
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**62:
        raise StateError(f"'epoch' in a state must be a whole number of at least 0, not {epoch!r:.80}.")
    return epoch


def differences(saved: Any, now: Any, name: str = "") -> list[str]:
    """Each setting that differs, with both values.

    Descends into lists and dicts, so that a cut-off part is never the difference.
    """
    if saved == now:
        return []
    if isinstance(saved, dict) and isinstance(now, dict):
        parts = [(f"{name}.{key}" if name else str(key), key) for key in sorted({*saved, *now}, key=str)]
        return [
            one
            for part, key in parts
            for one in differences(saved.get(key, _NOT_THERE), now.get(key, _NOT_THERE), part)
        ]
    if isinstance(saved, list | tuple) and isinstance(now, list | tuple):
        pairs = enumerate(zip_longest(saved, now, fillvalue=_NOT_THERE))
        return [one for place, (was, is_) in pairs for one in differences(was, is_, f"{name}[{place}]")]
    meaning = _CHECKSUMS.get(name.rpartition(".")[2])
    hint = f" (checksums of {meaning})" if meaning else _REMEDIES.get(name.partition(".")[0], "")
    return [f"{name} was {saved!r:.80} and is {now!r:.80}{hint}"]


_REMEDIES: Final = {
    **dict.fromkeys(
        ("dataset_length", "shards"), " (if there is more behind what there was: grow=True; in a mix, one more source)"
    ),
    **dict.fromkeys(
        ("batch_size", "most", "max_tokens", "budget"),
        " (of one rank, and part of the plan of the epoch: with groups keep it, whatever the number of ranks. On half "
        "as many, accumulate the gradients of twice as many batches, which keeps the size of a step)",
    ),
    "batches_of": " (with a batch_size a loader makes batches of samples; with batch_size=None it gives them singly)",
    "held": " (a step holds this; its settings() may say what counts instead)",
    "skip": (
        " (of the ranges to skip, those that begin before the state: what was delivered cannot be skipped, and what "
        "was skipped is not delivered)"
    ),
    "sample_seed": " (pass the same seed on every rank: samples draw different numbers anyway, by their position)",
}
"""What to change, by setting."""


_CHECKSUMS: Final = {
    "orders": "the orders of the mix's sources",
    "sources": (
        "the names, lengths and orders of the mix's sources that were used, which must stay; the weight 0 in a new "
        "stage ends one"
    ),
    "stages": "the mix's weights up to here; to change them from here on, add a stage",
    "weights": "all weights; build the order with those of that epoch, or update it with them before the load",
    SHARD_NAMES: "the names of the shards, in their order",
    "pieces": "the numbers of row groups or batches in the files",
    SUBSET_INDICES: "the indices of the Subset",
}
"""What the settings that are checksums stand for."""


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each setting that differs, with both values.

    A seed is compared if both have it: a mapper may be added or removed. So are the pieces, which only growing data
    tell, and the length of a dataset, which in older states of a stream is that of its epochs.
    """
    untold = {name for name in (*SEEDS, "pieces", "dataset_length") if name not in saved or name not in now}
    saved, now = ({name: value for name, value in settings.items() if name not in untold} for settings in (saved, now))
    return differences(saved, now)


class _NotThere:
    """Placeholder for a setting that only the other state has; equal to no value."""

    def __repr__(self) -> str:
        return "missing"


_NOT_THERE = _NotThere()


def warn_of_start(differences: list[str], epoch: int) -> None:
    warnings.warn(
        f"strict=False: this state was saved under other settings ({'; '.join(differences)}), so loading starts at "
        f"epoch {epoch}.",
        stacklevel=3,
    )
