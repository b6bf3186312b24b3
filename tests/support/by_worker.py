"""IterableDatasets that split themselves by worker. An item is its address: (1000 * epoch + record, worker)."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from global_draws import draw
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Split(IterableDataset[Any]):
    """Shards of these lengths; worker w of L reads the shards w, w + L, …"""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths, self.epoch = [*lengths], 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def own(self) -> Iterator[Any]:
        """The addresses that this worker yields."""
        info = get_worker_info()
        assert info is not None
        begins = [0, *accumulate(self.lengths)]
        for shard in range(info.id, len(self.lengths), info.num_workers):
            for record in range(begins[shard], begins[shard + 1]):
                yield 1000 * self.epoch + record, info.id

    def __iter__(self) -> Iterator[Any]:
        yield from self.own()


class Draws(Split):
    """Each item has draws from the three global generators, from its number ``quiet`` on."""

    def __init__(self, lengths: Iterable[int], quiet: int = 0) -> None:
        super().__init__(lengths)
        self.quiet = quiet

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.own()):
            yield item, draw() if number >= self.quiet else None


class Saved(Split):
    """Has a state, and writes each item that it makes into the file ``read``."""

    def __init__(self, lengths: Iterable[int], read: Any = None) -> None:
        super().__init__(lengths)
        self.read, self.at = read, 0

    def __iter__(self) -> Iterator[Any]:
        own = [*self.own()]
        while self.at < len(own):
            item = own[self.at]
            self.at += 1
            self.note(item)
            yield item

    def note(self, item: Any) -> None:
        if self.read is not None:
            with open(self.read, "a") as file:
                file.write(f"{item}\n")

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Restarting(Saved):
    """Its ``__iter__`` begins afresh, so that a state must be loaded after it."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return super().__iter__()


class OwnIterator(Split):
    """Only its iterator has a state."""

    def __init__(self, lengths: Iterable[int], read: Any = None) -> None:
        super().__init__(lengths)
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return _OwnIterator([*self.own()], self)


class _OwnIterator:
    note = Saved.note

    def __init__(self, items: list[Any], of: OwnIterator) -> None:
        self.items, self.at, self.read = items, 0, of.read

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        self.note(self.items[self.at - 1])  # type: ignore[arg-type]
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def share(lengths: list[int], lanes: int, worker: int, pass_: int) -> list[Any]:
    """What `Split` yields as one of ``lanes`` workers."""
    begins = [0, *accumulate(lengths)]
    return [
        (1000 * pass_ + record, worker)
        for shard in range(worker, len(lengths), lanes)
        for record in range(begins[shard], begins[shard + 1])
    ]


def stream(lengths: list[int], lanes: int, of: Callable[..., list[Any]] = share) -> Iterator[Any]:
    """The sequence by the rule alone: lane k reads worker (k + p) mod lanes in pass p, and the lanes yield in turn."""

    def lane(k: int) -> Iterator[Any]:
        pass_ = 0
        while True:
            yield from of(lengths, lanes, (k + pass_) % lanes, pass_)
            pass_ += 1

    running = [lane(k) for k in range(lanes)]
    while True:
        for one in running:
            yield next(one)
