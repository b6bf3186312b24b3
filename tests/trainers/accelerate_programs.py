"""Accelerate's own programs, from its wheel, and a training loop as its examples have it, with a ``DataLoader`` or with
an `AccelerateLoader` in the line of the loader; nothing else differs. Rank 0 prints what was gathered, the learning
rates and the numbers of steps.

python accelerate_programs.py DataLoader|penstock    # or under torchrun
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import types
from typing import Any

import accelerate
import torch
from accelerate.test_utils.scripts import test_distributed_data_loop as data_loop
from accelerate.test_utils.scripts import test_sync as sync
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import BatchSampler, IterableDataset, TensorDataset

import penstock
from penstock.integrations.accelerate import AccelerateLoader

KIND = sys.argv[1]
TOLD: dict[str, Any] = {}


class Accelerator(accelerate.Accelerator):
    """Remembers the newest one, for the line of the loader, and what was gathered."""

    newest: Any = None

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        Accelerator.newest = self

    def gather_for_metrics(self, data: Any, *args: Any, **words: Any) -> Any:
        gathered = super().gather_for_metrics(data, *args, **words)
        TOLD.setdefault("gathered", []).append(str(gathered))
        return gathered


def loader_of(*args: Any, **words: Any) -> Any:
    """The line of the loader."""
    if KIND == "DataLoader":
        return torch.utils.data.DataLoader(*args, **words)
    if isinstance(args[0], IterableDataset):
        words |= {"split": "items", "tail": "exact"}
    return AccelerateLoader(penstock.Loader.from_dataset(*args, **words), Accelerator.newest)


def wheel_sync(accelerator: Accelerator) -> None:
    """Gradients are synchronized in the same steps. These compare with a model that trains alone, and assert."""
    if accelerator.num_processes == 1:
        sync.test_noop_sync(accelerator)
    else:
        sync.test_distributed_sync(accelerator)
        sync.test_distributed_sync_multiple_fwd(accelerator)
        sync.test_gradient_accumulation()
    sync.test_gradient_accumulation_with_opt_and_scheduler()
    sync.test_dataloader_break()


def wheel_metrics() -> None:
    """Each sample is gathered once, in the order of the data."""
    sys.modules.setdefault("evaluate", types.ModuleType("evaluate"))  # for what is not called here
    from accelerate.test_utils.scripts.external_deps import test_metrics as metrics

    metrics.DataLoader, metrics.Accelerator = loader_of, Accelerator
    metrics.RegressionDataset = functools.partial(metrics.RegressionDataset, seed=1)
    for samples, batch_size in ((99, 16), (82, 16), (512, 16), (11, 4), (17, 4), (1, 4)):
        metrics.test_torch_metrics(Accelerator(), samples, batch_size=batch_size)
    metrics.test_gather_for_metrics_drop_last()


def wheel_data_loop(accelerator: Accelerator) -> None:
    """Sizes of batches, even and uneven."""
    data = data_loop.DummyDataset()
    data_loop.test_data_loader(loader_of(data, batch_size=8, shuffle=True), accelerator)
    TOLD.clear()  # torch's order is another one
    data_loop.test_data_loader(loader_of(data, batch_size=8), accelerator)
    data_loop.test_data_loader(loader_of(data, batch_sampler=BatchSampler(range(22), 11, False)), accelerator)
    for samples in (3, 11, 16, 22):
        batches = BatchSampler(range(samples), 4, False)
        loader = accelerator.prepare(loader_of(TensorDataset(torch.arange(samples)), batch_sampler=batches))
        gathered = [accelerator.gather_for_metrics(batch).tolist() for (batch,) in loader]
        assert [number for batch in gathered for number in batch] == list(range(samples))
    if accelerator.num_processes == 2:
        data_loop.test_default_ensures_even_batch_sizes()
        data_loop.test_can_disable_even_batches()


def trained(samples: int, schedule: str, drop_last: bool, window: int) -> None:
    """As in Accelerate's complete example, and in the scripts of Transformers and Diffusers without a trainer: the
    schedule is made from ``len`` before ``prepare``, and progress from ``len`` after it.
    """
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window))
    x = torch.arange(samples, dtype=torch.float).unsqueeze(1) / samples
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = loader_of(TensorDataset(x), batch_size=4, shuffle=True, drop_last=drop_last)
    evaluate = loader_of(TensorDataset(x, torch.arange(samples)), batch_size=8)
    total = len(train) * 2 // window
    scheduler: Any = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total + accelerator.num_processes)
        if schedule == "one cycle"
        else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    )
    model, optimizer, train, evaluate, scheduler = accelerator.prepare(model, optimizer, train, evaluate, scheduler)
    rates, steps, synchronized = [], [len(train), len(evaluate)], 0
    for _ in range(2):
        for (inputs,) in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(round(scheduler.get_last_lr()[0], 9))
            synchronized += accelerator.sync_gradients
        numbers: list[int] = []
        for inputs, index in evaluate:
            model(inputs)
            numbers += accelerator.gather_for_metrics(index).tolist()
        assert numbers == list(range(samples))
    TOLD[f"{samples}, {schedule}, {drop_last=}, {window=}"] = [total, steps, synchronized, rates]


def main() -> None:
    for module in (sync, data_loop):
        module.DataLoader, module.Accelerator = loader_of, Accelerator
    accelerator = Accelerator()
    with contextlib.redirect_stdout(io.StringIO()):
        wheel_sync(accelerator)
        wheel_data_loop(accelerator)
        wheel_metrics()
        for samples in (80, 82, 87):
            trained(samples, "linear", False, 1)
        trained(82, "linear", True, 1)
        trained(87, "linear", True, 3)
        trained(82, "linear", False, 3)
        trained(82, "one cycle", False, 1)
    if accelerator.is_main_process:
        print("TOLD " + json.dumps(TOLD), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
