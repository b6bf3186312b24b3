"""A worker's task, and what any work on one shares: seeded random numbers, the meter, and errors that name the address.

Independent of threads and processes. A task is an `Indices`, any other item, a `Part` of a batch, or a batch that was
`Loaded` in parts. A sample's random numbers are seeded by (seed, epoch, position), so a task can run anywhere, and can
be repeated.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from penstock._errors import Once, suppress_own
from penstock._fetch.error_policy import annotate
from penstock._fetch.first_sample import Differing, difference, say
from penstock._fetch.held_generators import HeldGenerators
from penstock._fetch.indices import Indices
from penstock._fetch.sample import SampleCursor, current
from penstock._fetch.told_parts import ToldParts
from penstock._memory.allocation import anywhere
from penstock._memory.modes import in_neutral_modes
from penstock._random.draws import looker
from penstock._random.global_seeding import CALM, GlobalSeeding
from penstock._workers.meter import Meter, measuring
from penstock._workers.pool import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableSequence, Sequence

    from penstock._memory.allocation import Allocate


T = TypeVar("T")


class Part(NamedTuple):
    """Some ``rows`` of a batch, in ascending order.

    The worker returns their samples uncollated; the consumer collates all parts together. ``travels``: to another
    process, which makes the batch itself, so the samples may travel in columns.
    """

    indices: Indices
    rows: Sequence[int]
    travels: bool = False

    def __reduce__(self) -> Any:
        return Part, (self.indices, (), self.travels)  # the worker does not need the rows


class Loaded(NamedTuple):
    """A batch whose samples are loaded: the ``values`` of its parts."""

    indices: Indices
    parts: Sequence[Part]
    values: Sequence[Any]


class Task:
    """`Work` on a task, either of a function or of a dataset.

    Args:
        seed: The seed of the samples' random numbers.
        seed_global_rngs: Seed the global generators of ``random``, ``numpy.random`` and torch for each sample; see
            `GlobalSeeding`.
        roots: The user's objects, by the first words of their paths.

    Attributes:
        dataset: ``get_worker_info().dataset`` in a worker process.
        noun: What messages call an index.
        slot_name: Describes an index of what is read in lanes, instead of the noun.
        told_parts: What has a ``set_epoch``, which is called when a task's epoch differs from that of the task before.
        generators: The generators that the user's objects hold.
    """

    dataset: Any = None
    noun = "dataset index"
    slot_name: Callable[[int], str] | None = None
    told_parts: ToldParts = ToldParts(None)
    told: int | None = None  # the epoch that was passed to them last, in this process
    _differs = 0  # the result of `difference`, until it is told

    def __init__(self, seed: int, seed_global_rngs: bool | Literal["always"], roots: Mapping[str, Any]) -> None:
        if seed_global_rngs not in (True, False, "always"):
            raise ValueError(f"seed_global_rngs={seed_global_rngs!r} must be True, False or 'always'.")
        self.seed = seed
        self.generators = HeldGenerators(seed, roots, bool(seed_global_rngs))
        self._seeding = GlobalSeeding(seed, bool(seed_global_rngs), calm=None if seed_global_rngs == "always" else CALM)
        self.meter = Meter()  # for work in the caller's thread; each worker has its own
        self._once = Once()

    def __call__(
        self, task: Any, current_row: MutableSequence[int], allocate: Allocate = anywhere, *, inline: bool = False
    ) -> Any:
        meter = self.meter if inline else measuring.get()
        if meter is not None:
            if meter.plain:
                meter.plain -= 1
                meter = None
            else:
                meter.measure(current_row)
        token = current.set(None)
        try:
            value = self._done(task, current_row, allocate, inline, meter)
            if self._differs:
                level, self._differs = self._differs, 0
                value = Differing(value, level)
            return self.unwrapped(value) if inline else value
        except BaseException as exc:
            annotate(exc, f"while loading {self.name(task, current_row[0])}")
            raise
        finally:
            current.reset(token)
            if meter is not None:
                self._measured(meter, task.indices if isinstance(task, Part | Loaded) else task)

    @in_neutral_modes
    def inline(self, task: Any, allocate: Allocate = anywhere) -> Any:
        """Do the task in the caller's thread, and leave its global generators unchanged.

        User code runs with the modes of a new thread, as it does in a worker: with gradients, even if ``next`` is
        called under ``torch.no_grad``, and never in inference mode, under autocast or with another default device.
        """
        return self(task, [IDLE], allocate, inline=True)

    def unseeded(self, task: Any, allocate: Allocate = anywhere) -> Any:
        """`inline`, in a thread that is not the consumer's: global generators are not touched. Those that objects hold
        are seeded nevertheless, because the consumer does not draw from them.
        """
        seeding, self._seeding = self._seeding, GlobalSeeding(self.seed, False)
        try:
            return self.inline(task, allocate)
        finally:
            self._seeding = seeding

    def unwrapped(self, value: Any) -> Any:
        """What a worker has made, in the consumer's process, which says once that the workers' first samples differ."""
        if type(value) is not Differing:
            return value
        if self._once(value.level):
            say(self.parts_that_may_draw, value.level)
        return value.value

    def tell(self, epoch: int, *, inline: bool) -> None:
        """Tell the `told_parts` that samples of ``epoch`` come next. ``inline``: in the loop's thread, and the loop may
        have told them another number.
        """

    def _done(
        self, task: Any, current_row: MutableSequence[int], allocate: Allocate, inline: bool, meter: Meter | None
    ) -> Any:
        """Do the task, and record its cost in ``meter``."""
        raise NotImplementedError

    @property
    def collates_itself(self) -> bool:
        """Whether the user's own code makes the batches."""
        return False

    @property
    def parts_that_may_draw(self) -> str:
        """A description of the user's code that it runs."""
        raise NotImplementedError

    def name(self, task: Any, row: int) -> str:
        """A description of ``task``, or of one row of it, for messages."""
        if isinstance(task, Part | Loaded):
            task = task.indices
        if not isinstance(task, Indices):
            return f"the item {task!r:.80}"
        if task.is_batch and row != IDLE:
            task = task[row]
        if task.is_batch and not len(task):
            return f"an empty batch (epoch {task.epoch})"
        if task.is_batch:
            indices = task.plain()
            shown = f"[{', '.join(map(str, indices[:8]))}{', …' if len(indices) > 8 else ''}]"
            what = "dataset indices" if self.noun == Task.noun else "items"
            return (
                f"the batch of {what} {shown} (epoch {task.epoch}, positions {task.positions[0]} to "
                f"{task.positions[-1]})"
            )
        if self.slot_name is not None:
            return f"{self.slot_name(task.values)} (epoch {task.epoch})"
        key = str(task.values)
        return (
            f"{self.noun} {key if len(key) <= 80 else key[:79] + '…'} (epoch {task.epoch}, position {task.positions})"
        )

    def _measured(self, meter: Meter, task: Any) -> None:
        """Finish measuring a batch.

        The slowest sample is identified by its index, if it has one, or by its position.
        """
        indices = task if isinstance(task, Indices) else None

        def name_of(row: int) -> int | str | None:
            if indices is None or (indices.is_batch and not len(indices)):
                return None
            item = indices[max(0, row)] if indices.is_batch else indices
            name: int | str = (
                item.values if self.dataset is not None and isinstance(item.values, int | str) else item.positions
            )
            return name

        meter.measured(len(indices) if indices is not None and indices.is_batch else 1, name_of)

    def _begin(self, loading: SampleCursor, position: int) -> None:
        loading.begin_again()
        loading.reseed = self._reseed
        if loading.reseed is not None:
            loading.reseed(loading.epoch, position)
        current.set(loading)

    def _compared(self, function: Callable[[Any], T], begin: Callable[[], Any], item: Any) -> T:
        """``function(item)``. For the first sample in this process it is called again with a copy, after ``begin()``,
        which seeds alike. What comes of the comparison is told with the value.

        If a generator appears meanwhile, which was not seeded then, the last of up to three values counts.
        """
        generators, copies, found = self.generators, [], 0
        if not generators.is_first:
            return function(item)
        with suppress_own():  # what cannot be copied, and may be modified, is not used again
            copies = [copy.deepcopy(item), copy.deepcopy(item)]
        # a draw from a generator that is not seeded here is named by another watch
        others = dict if generators.seeds else generators.states
        look: Callable[[], Any] = tuple if self._seeding.active else looker(others)
        before = look()
        value = function(item)
        generators.is_first = False
        for again in copies:
            new = generators.seeds and generators.look_again()
            begin()
            second, found = value, 0
            with suppress_own():  # it need not work twice
                second = function(again)
                found = difference(value, second)
            if not new:
                break
            value = second
        if found and look() == before:
            self._differs = found
        return value

    def _run(self, load: Callable[[], T], *, of_many: bool, kept: bool) -> T:
        """Return ``load()``, seeded as it needs; see `GlobalSeeding.run` and `HeldGenerators.run`."""
        generators = self.generators
        if generators.quiet:
            return self._seeding.run(load, of_many=of_many, kept=kept)
        return generators.run(partial(self._seeding.run, load, of_many=of_many, kept=kept), kept=kept)

    @property
    def _reseed(self) -> Callable[[int, int], None] | None:
        """Seeds for (epoch, position) what must be seeded; None if nothing must."""
        if not self._seeding.active:
            return self.generators.seed if self.generators.found else None
        return self._seed_all if self.generators.found else self._seeding.seed

    def _seed_all(self, epoch: int, position: int) -> None:
        self._seeding.seed(epoch, position)
        self.generators.seed(epoch, position)
