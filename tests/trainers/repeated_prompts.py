"""The sampler of TRL's GRPO, with Accelerate's ``DataLoader`` and with penstock's loaders, on as many ranks as were
started.

repeated_prompts.py FOLDER

Rank 0 writes to FOLDER/ranks-<n>.json what was gathered in each round, and what came after the state that the last run
left in FOLDER, on any number of ranks; then it leaves its own.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from penstock import Loader
from penstock.integrations.accelerate import AccelerateLoader

PROMPTS, G, ROUND, EPOCHS, AT = 13, 4, 8, 3, 17
"""An epoch has 12 rounds of two groups, each round twice. The state is saved after `AT` rounds."""


def sampler(shuffle: bool) -> Any:
    """As GRPOTrainer builds it: new completions for every second round."""
    return RepeatSampler(range(PROMPTS), mini_repeat_count=G, batch_size=ROUND // G, repeat_count=2, shuffle=shuffle)


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes

    def loader(shuffle: bool, split: Any = None) -> Loader[Any]:
        return Loader.from_dataset(range(PROMPTS), ROUND // ranks, sampler=sampler(shuffle), split=split)

    def rounds(batches: Any) -> list[list[int]]:
        return [accelerator.gather(batch).tolist() for _ in range(EPOCHS) for batch in batches]

    found: dict[str, Any] = {}
    for shuffle in (False, True):
        own = sampler(shuffle)
        if shuffle:
            own.generator.manual_seed(7)  # on all ranks
        of_torch = accelerator.prepare(DataLoader(range(PROMPTS), ROUND // ranks, sampler=own))
        made = loader(shuffle), loader(shuffle, "batches")
        ways = {"DataLoader": of_torch, "Accelerate": AccelerateLoader(made[0], accelerator), "Loader": made[1]}
        for name, batches in ways.items():
            found[f"{name}, {shuffle=}"] = rounds(batches)
        for one in made:
            one.close()
    for name in ("Accelerate", "Loader"):
        state, one = folder / name, loader(True, "batches" if name == "Loader" else None)
        accelerator = Accelerator(cpu=True)
        batches = AccelerateLoader(one, accelerator) if name == "Accelerate" else one
        if state.exists():
            if name == "Loader":
                one.load_state_dict(json.loads(state.read_text()))
            else:
                accelerator.load_state(str(state))
            begun = one.epoch
            found[f"{name}, resumed"] = [
                accelerator.gather(batch).tolist() for _ in range(begun, EPOCHS) for batch in batches
            ]
            one.set_epoch(0)
        every = (batch for _ in range(EPOCHS) for batch in batches)
        for _ in islice(every, AT):
            pass
        accelerator.wait_for_everyone()
        if name == "Accelerate":
            accelerator.save_state(str(state))
        elif accelerator.is_main_process:
            state.write_text(json.dumps(one.state_dict()))
        every.close()
        one.close()
    if accelerator.is_main_process:
        (folder / f"ranks-{ranks}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
