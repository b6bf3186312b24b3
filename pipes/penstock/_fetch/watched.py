"""A `Fetch` whose parts are watched for draws from the global generators."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, final

from penstock._arguments import brief
from penstock._fetch.dataset_facts import DatasetView
from penstock._fetch.fetch import Fetch, IdentityDataset
from penstock._fetch.padding import Padded

if TYPE_CHECKING:
    from penstock._random.draws import Trial


def parts(fetch: Fetch) -> dict[str, str]:
    """The user's code in ``fetch``: attribute names and descriptions."""
    dataset, collate_fn = fetch.dataset, fetch.collate_fn
    found = {}
    if not isinstance(dataset, IdentityDataset) and not fetch.is_arrays:
        of = type(dataset.dataset if isinstance(dataset, DatasetView) else dataset)
        found["dataset"] = f"{brief(of)}.{'__getitems__' if fetch.has_getitems else '__getitem__'}"
    if fetch.transform is not None:
        found["transform"] = f"transform {brief(fetch.transform)}"
    if collate_fn is not None and type(collate_fn) is not Padded:
        found["collate_fn"] = f"collate_fn {brief(collate_fn)}"
    return found


def watched(fetch: Fetch, trial: Trial) -> Fetch:
    """The same fetch, with its `parts` watched by ``trial``."""
    found = copy.copy(fetch)
    for word, part in parts(fetch).items():
        one = getattr(fetch, word)
        setattr(found, word, _Watched(one, trial, part) if word == "dataset" else trial.watched(one, part))
    return found


@final
class _Watched(DatasetView):
    def __init__(self, dataset: Any, trial: Trial, part: str) -> None:
        self.dataset = dataset
        self._trial = trial
        self._part = part

    def __getitem__(self, index: Any) -> Any:
        return self._trial.watched(self.dataset.__getitem__, self._part)(index)

    def __getitems__(self, indices: list[Any]) -> Any:
        return self._trial.watched(self.dataset.__getitems__, self._part)(indices)
