"""RunChanges: what a run changes while it runs, which is in its state.

The samples in progress are known on one rank only, and only now. So a change begins behind the most that may be in
progress, counted from the step: all ranks find the same.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import zlib
from typing import TYPE_CHECKING, Any, Final, final

from penstock._arguments import whole_number
from penstock._changing.skipping import Skipping, Skips
from penstock._errors import GraphError, StateError, StateMismatch
from penstock._nodes.index_node import IndexNode
from penstock._nodes.node import is_count, place_of
from penstock._nodes.sampler import Sampler
from penstock._nodes.sharder import Sharder, ranks_of
from penstock._random.mix_stages import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PLAIN: Final = 512
"""Longer JSON is compressed."""
_MOST: Final = 2**24
"""The most characters of JSON that a state may hold in compressed form."""


@final
class RunChanges:
    """The changes of a run, in the first node of the graph that ``reader``, a `GraphReader`, reads."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._first: Any = reader.positions.first
        self._saved: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # what there was, and its entry

    def saved(self) -> dict[str, Any]:
        """The entry of a state; empty without changes."""
        if (now := self._now()) != self._saved[0]:  # an order may be changed without this object
            self._saved = now, packed(now)
        return self._saved[1]

    @contextlib.contextmanager
    def adopted(self, state: dict[str, Any], *, strict: bool) -> Iterator[list[str]]:
        """Have the changes of the run that saved ``state``, which is parsed, and no others; those before, if the
        context raises.

        Nothing reads by them until it has ended.

        Yields:
            Why this loader cannot have them, so that it has none, if not ``strict``.

        Raises:
            StateError: They are damaged.
            StateMismatch: This loader cannot have them.
        """
        changing, changes = self._first.changing, changes_in(state)
        if changing is not None and "groups" not in self._first.facts.settings:  # groups are of epochs as they were
            changes = checked({**changing.presumed(state["settings"]), **changes})
        before, refused = self._now(), list[str]()
        with self._reader.still() if changes != before else contextlib.nullcontext():
            try:
                try:
                    if changes != before:
                        self._adopt(changes)
                except StateError:
                    raise
                except (TypeError, ValueError) as exc:
                    refused = [
                        f"the run that saved this state had changed {', '.join(changes)}, which this loader cannot do: "
                        f"{exc}"
                    ]
                    if strict:
                        raise StateMismatch(refused[0]) from None
                    self._adopt({})
                yield refused
                if before.get("grow") != self._now().get("grow"):
                    self._reader.renew_workers()  # the copy of a stream that each of them has finds its shards itself
            except BaseException:
                self._adopt(before)
                raise

    def resume_at(self, state: Any) -> None:
        """The run goes on at ``state``, which is checked: what it finds there from now on is part of it.

        An epoch that was over, and is longer now, goes on with the items that no rank got: ``state`` is changed so.
        """
        if (at := place_of(state)) is not None and self._first.changing is not None:
            (epoch, place), first = at, self._first
            epoch, place = (epoch + 1, first.start(epoch + 1)) if place is None else (epoch, place)
            first.changing.resume_at(epoch, place.get("position", 0), first.passed(place))
            if "left" in place and place["position"] < first.length_of(epoch):  # it was over, and is longer now
                place["position"] -= place.pop("left")

    def _now(self) -> dict[str, Any]:
        changing = self._first.changing
        found: dict[str, Any] = {} if changing is None else changing.changes()
        return found

    def _adopt(self, changes: dict[str, Any]) -> None:
        """Replace the changes. Raises what `Changing.adopt` does."""
        first = self._first
        if "skip" in changes and isinstance(first, Sampler) and first.skipping is None:
            Skipping(first)
        if first.changing is not None:
            first.changing.adopt(changes)
            first.recompute()
        elif changes:
            what = type(getattr(first, "order", first)).__name__
            raise ValueError(f"a {what} has none{' without grow=True' if 'grow' in changes else ''}.")

    def told(self, state: Any) -> str:
        """Where a state is that does not fit, for the message; it is not checked."""
        choices = self._first.choices()
        plan = " and ".join(f"{name} {choices[name]}" for name in ("skip", "stages from") if choices.get(name))
        with contextlib.suppress(AssertionError, LookupError, TypeError):
            return (
                f" The state is at sample {self._passed(state)} of training, and this loader has {plan:.200}."
                if plan
                else ""
            )
        return ""

    def reweight(self, weights: Any, at: int | None) -> int:
        """See `Loader.reweight`."""
        first, grain = self._first, getattr(self._first.changing, "grain", 0)
        if not grain:
            settings = first.facts.settings
            by_key = " in Buckets by key, whose rounds are planned ahead" if settings.get("groups") == "keys" else ""
            raise ValueError(
                f"reweight changes the weights of a penstock.Mix, but this loader reads "
                f"{settings.get('order', 'an iterable')!r}{by_key}."
            )
        with self._reader.still():
            planned = self._planned(known=at is not None)
            start: int = -(-(planned if at is None else whole_number("at", at, 0)) // grain) * grain
            if start < planned:
                raise ValueError(
                    f"at={at} is in the past: the samples before item {planned} have been delivered, or may be in "
                    f"progress. Use at={planned} or later, or leave it out."
                )
            before = self._now()
            stages = [pair for pair in before.get("stages", []) if pair[0] < start]
            self._adopt({**before, "stages": [*stages, (start, as_json(weights))]})
        return start

    def _planned(self, *, known: bool) -> int:
        """The first sample of training that nobody has planned yet. ``known``: the ranks need not agree on it."""
        reader, nodes = self._reader, list(self._reader.root.chain())
        level = next(number for number, one in enumerate(nodes) if isinstance(one, IndexNode))
        node: Any = nodes[level]
        here = reader.cursor.here
        while "delivered" in here:
            here = here["source"]
        if reader.cursor.pending or reader.owner is None:
            return self._passed(here)
        world_size = ranks_of(node)[1]
        most = [one.ahead for one in nodes[:level]]
        uneven = world_size > 1 and any(isinstance(one, Sharder) and one.tail == "exact" for one in nodes)
        if None in most or uneven:
            if world_size > 1 and not known:
                raise GraphError(
                    "in one step the ranks may be at different samples, because of tail='exact', in_order=False or "
                    "num_workers='auto'. Pass at=, the same item on every rank."
                )
            return self._passed(node.get_state())
        for _ in range(sum(filter(None, most))):
            items, here = node.read(here, 1)
            if not len(items):
                items, here = node.read(node.over(here)[1], 1)
        return self._passed(here)

    def _passed(self, here: Any) -> int:
        at = place_of(here)
        assert at is not None
        epoch, source = at
        found: int = self._first.passed(self._first.start(epoch + 1) if source is None else source)
        return found


def packed(changes: dict[str, Any]) -> dict[str, Any]:
    """The entry of a state with these changes; empty without."""
    text = json.dumps(changes, separators=(",", ":"))
    found = changes if len(text) <= _PLAIN else base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return {"changes": found} if changes else {}


def skipping(state: dict[str, Any], ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """A state that is parsed, whose loader skips ``ranges`` as well.

    Raises:
        StateError: It is damaged, or does not count samples.
        ValueError: A range begins before the state, or overlaps another one.
    """
    settings, (epoch, at) = state["settings"], place_of(state["state"]) or (0, {})
    length, changes = settings.get("length", -1), changes_in(state)
    at = {"position": length} if at is None else at
    since, begin, size = [era for era in ((0, 0, length), *changes.get("epochs", ())) if era[0] <= epoch][-1]
    position, left = at.get("position"), at.get("left", 0)
    origin = at.get("origin", begin + (epoch - since) * size if isinstance(size, int) else -1)
    grows = "grow" in changes and "origin" not in at
    if grows or "groups" in settings or "checksum" in at or not all(map(is_count, (position, left, origin))):
        raise StateError(
            f"this state does not count the samples since the start of training: its loader has a sampler, groups, "
            f"{'grow=True, ' * grows}or an iterable. Only an order can skip."
        )
    here = origin + position - left
    if (first := min(begin for begin, _ in ranges)) < here:
        raise ValueError(
            f"a range begins at sample {first:,}, but the state is at sample {here:,}: what has been delivered cannot "
            f"be skipped. Take an older state."
        )
    run = settings.get("run", 1)
    skips = Skips([*changes.get("skip", []), *ranges], run if is_count(run) and run else 1)
    return {**state, **packed({**changes, "skip": skips.ranges})}


def changes_in(state: dict[str, Any]) -> dict[str, Any]:
    """The changes in a state that is parsed.

    Raises:
        StateError: They are damaged.
    """
    found = state.get("changes", {})
    try:
        if isinstance(found, str):
            unpacked = zlib.decompressobj()
            text = unpacked.decompress(base64.b85decode(found), _MOST)
            found = json.loads(text) if unpacked.eof else None
    except (ValueError, RecursionError, zlib.error):
        found = None
    return checked(found)


def checked(changes: Any) -> dict[str, Any]:
    """Changes, which may be damaged.

    Raises:
        StateError: They are no lists of positions and of what changes there.
    """
    named: list[tuple[str, Any]] = [*changes.items()] if isinstance(changes, dict) else [("", None)]
    for name, entries in named:
        kinds = _KINDS.get(name)
        whole = isinstance(entries, list) and (kinds is None or all(_are(kinds, entry) for entry in entries))
        if not whole or (name == "weights" and len(entries) != 1):
            raise StateError(f"the changes{f' {name!r}' if name else ''} in this state are damaged. Load an older one.")
    found: dict[str, Any] = changes
    return found


def _are(kinds: tuple[Callable[[Any], bool], ...], entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == len(kinds)
        and all(is_kind(value) for is_kind, value in zip(kinds, entry, strict=True))
    )


def _is_checksum(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.fullmatch("[0-9a-f]+", value) is not None)


def _are_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(weight, int | float | str) for weight in value.values())


_KINDS: Final[dict[str, tuple[Callable[[Any], bool], ...]]] = {
    "skip": (is_count, is_count),
    "grow": (is_count, is_count),
    "epochs": (is_count, is_count, is_count),
    "stages": (is_count, _are_weights),
    "weights": (is_count, _is_checksum, _is_checksum),
}
"""What each change is a list of: a position, and what changes there."""
