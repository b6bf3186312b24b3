"""A run stops after 40 batches and continues with twice the batch size, with other weights of its two sources, or with
a third source. Which of these can it do?

Shuffled. A change works if each source, or each worker, continues where it was and in its own order, so that nothing is
lost or repeated; if over the next 40 batches each source has its new share, within a tenth of all; and if a second
stop, 20 batches after the change, can be resumed exactly. Where a mix loses samples, the same stop without a change
shows whether the change is the cause. The batch size is asked of the data of the other programs, with two worker
processes. Weights and sources are asked of a mix in one process, if the loader has weighted mixes (for MosaicML
Streaming, OLMo-core and Energon, whose mixes are not set up here, see the page).

- *sources*, *weights*, *batch size*: what works;
- *none*: nothing does;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from peers import PEERS, SEED, Answer, Job, Opened, main, plain, said, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLAIMS = {
    "penstock": "batch size, weights, sources",
    "StatefulDataLoader": "batch size",
    "torchdata.nodes": "batch size, weights",
    "Grain": "batch size, weights, sources",
    "SPDL": "no state",
    "MosaicML Streaming": "batch size",
    "LitData": "weights",
    "Hugging Face streaming": "batch size",
    "webdataset": "no state",
    "OLMo-core": "batch size",
    "Lhotse": "none",
    "Energon": "none",
    "Ray Data": "no state",
}
BEFORE = {"a": 3, "b": 1}
CHANGES: dict[str, tuple[dict[str, int], int]] = {  # the weights and the batch size after it
    "batch size": (BEFORE, 16),
    "weights": ({"a": 1, "b": 3}, 8),
    "sources": ({"a": 3, "b": 1, "c": 4}, 8),
}
CONTROL = "no change"
LENGTH = 4000  # of a source; its numbers begin at 10,000 times its place


class Source:
    """The numbers of a source, by index."""

    def __init__(self, name: str) -> None:
        self.begin = 10_000 * "abc".index(name)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return self.begin + index


# Each opens a mix with these weights, in the state of an earlier run if there is one; that run had the weights BEFORE
# unless it is the same as this one.


def penstock(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    import penstock

    mix = penstock.Mix({name: Source(name) for name in weights}, dict.fromkeys(weights, 0) | BEFORE, epoch_size=20_000)
    loader = penstock.Loader.from_dataset(mix, batch_size, shuffle=True, seed=SEED, collate_fn=plain)
    if state is not None:
        loader.load_state_dict(state)
        if not same and weights != BEFORE:
            loader.reweight(weights)
    return Opened(lambda: iter(loader), loader.state_dict, close=loader.close)


def nodes(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    import torchdata.nodes as tn
    from torch import Generator
    from torch.utils.data import RandomSampler

    def source(name: str) -> Any:
        order = RandomSampler(Source(name), generator=Generator().manual_seed(SEED))
        return tn.Mapper(tn.SamplerWrapper(order), Source(name).__getitem__)

    shares = {name: float(weight) for name, weight in weights.items()}
    mix = tn.MultiNodeWeightedSampler(
        {name: source(name) for name in weights}, shares, tn.StopCriteria.CYCLE_FOREVER, seed=SEED
    )
    loader = tn.Loader(tn.Batcher(mix, batch_size))
    if state is not None:
        loader.load_state_dict(state)
    return Opened(lambda: iter(loader), loader.state_dict)


def grain(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    """Iterators are mixed, which keep their own positions; mixed maps would compute all positions from the weights."""
    import grain as gr

    sources = [gr.MapDataset.source(Source(name)).seed(SEED).shuffle().to_iter_dataset() for name in weights]
    batches = iter(gr.IterDataset.mix(sources, list(weights.values())).batch(batch_size))
    if state is not None:
        batches.set_state(state)
    return Opened(lambda: batches, batches.get_state, close=batches.close)


def litdata(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

    for name in weights:
        if not (folder / name).exists():
            optimize(
                Source(name).__getitem__,
                list(range(LENGTH)),
                str(folder / name),
                chunk_size=500,
                num_workers=1,
                verbose=False,
            )
    sources = [StreamingDataset(str(folder / name), shuffle=True, seed=SEED) for name in weights]
    mix = CombinedStreamingDataset(
        sources, SEED, list(weights.values()), iterate_over_all=False, force_override_state_dict=True
    )
    loader = StreamingDataLoader(mix, batch_size=batch_size, num_workers=0, collate_fn=plain)
    if state is not None:
        loader.load_state_dict(state)
    return Opened(lambda: iter(loader), loader.state_dict)


def records(begin: int, shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(100 * shard, 100 * (shard + 1)):
            yield {"number": begin + number}


def hugging_face(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    from datasets import IterableDataset, interleave_datasets

    made = [{"begin": Source(name).begin, "shards": list(range(LENGTH // 100))} for name in weights]
    sources = [
        IterableDataset.from_generator(records, gen_kwargs=kwargs).shuffle(seed=SEED, buffer_size=1) for kwargs in made
    ]
    shares = [weight / sum(weights.values()) for weight in weights.values()]
    batched = interleave_datasets(sources, shares, seed=SEED).batch(batch_size)
    if state is not None:
        batched.load_state_dict(state)
    return Opened(lambda: (batch["number"] for batch in batched), batched.state_dict)


def lhotse(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicCutSampler

    def source(name: str) -> Any:
        numbers = (str(Source(name)[index]) for index in range(LENGTH))
        return CutSet.from_cuts(MonoCut(id=number, start=0, duration=1, channel=0) for number in numbers)

    mix = CutSet.mux(*map(source, weights), weights=list(weights.values()), seed=SEED)
    sampler = DynamicCutSampler(mix, max_cuts=batch_size, shuffle=True, seed=SEED)
    if state is not None:
        sampler.load_state_dict(copy.deepcopy(state))
    return Opened(
        lambda: ([int(cut.id) for cut in cuts] for cuts in sampler), lambda: copy.deepcopy(sampler.state_dict())
    )


MIXES: dict[str, Callable[[Any, dict[str, int], int, Any, bool], Opened]] = {
    "penstock": penstock,
    "torchdata.nodes": nodes,
    "Grain": grain,
    "LitData": litdata,
    "Hugging Face streaming": hugging_face,
    "Lhotse": lhotse,
}


def unmixed(name: str, workers: int) -> Callable[[Any, dict[str, int], int, Any, bool], Opened]:
    """The data of the other programs."""

    def opened(folder: Path, weights: dict[str, int], batch_size: int, state: Any, same: bool) -> Opened:
        loader = PEERS[name].open(folder, Job(workers=workers, batch_size=batch_size))
        if state is not None and loader.load is not None:
            loader.load(state)
        return loader

    return opened


def works(open_: Callable[..., Opened], folder: Path, change: str, workers: int = 0) -> str:
    """Empty if the change works, otherwise what is wrong."""
    first = open_(folder, BEFORE, 8, None, False)
    assert first.state is not None
    batches = first.epoch()
    taken(batches, 40)
    state = copy.deepcopy(first.state())
    rest = taken(batches, 100)  # how the run would have gone on without the change
    first.close()
    parts = [[number for batch in rest[worker :: workers or 1] for number in batch] for worker in range(workers or 1)]
    if change != "batch size":
        parts = [[number for number in parts[0] if number // 10_000 == place] for place in range(len(BEFORE))]

    weights, batch_size = CHANGES.get(change, (BEFORE, 8))
    loader = open_(folder, weights, batch_size, state, False)
    assert loader.state is not None
    batches = loader.epoch()
    found = taken(batches, 20)
    middle = copy.deepcopy(loader.state())
    later = taken(batches, 20)
    loader.close()
    if {len(batch) for batch in found} != {batch_size}:
        return f"batches of {len(found[0])}"
    flat = [number for batch in found + later for number in batch]
    for part in parts:
        members = set(part)
        came = [number for number in flat if number in members]
        if came != part[: len(came)]:
            return f"{len(set(part[: len(came)]) - set(came))} of {len(came)} samples lost"
    if change != "batch size":
        for place, weight in enumerate(weights.values()):
            share = sum(number // 10_000 == place for number in flat) / len(flat)
            if abs(share - weight / sum(weights.values())) > 0.1:
                return f"a source with the share {weight / sum(weights.values()):.2f} has {share:.2f}"
    again = open_(folder, weights, batch_size, middle, True)
    resumed = taken(again.epoch(), 20)
    again.close()
    return "" if resumed == later else "a second resume differs"


def question(name: str, folder: Path) -> Answer:
    if PEERS[name].open(folder, Job(workers=0)).state is None:
        return "no state", "the loader has no state_dict"
    wrong = {}
    for change in CHANGES if name in MIXES else ["batch size"]:
        try:
            if change == "batch size":
                wrong[change] = works(unmixed(name, 2), folder, change, 2)
            else:
                wrong[change] = works(MIXES[name], folder, change)
                if wrong[change].endswith("lost"):
                    wrong[change] += f" ({CONTROL}: {works(MIXES[name], folder, CONTROL) or 'exact'})"
        except Exception as error:
            wrong[change] = said(error)
    good = ", ".join(change for change, what in wrong.items() if not what)
    return good or "none", "; ".join(f"{change}: {what or 'exact'}" for change, what in wrong.items())


if __name__ == "__main__":
    main(CLAIMS, question)
