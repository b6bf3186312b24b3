"""Trains forever on two ranks, each with two worker processes. Each rank prints a line, and the program waits for an
interrupt."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning_cases import Model, new_trainer

import penstock
from penstock.integrations.lightning import LightningCallback
from penstock.testing import Tagged


class Telling(Model):
    def training_step(self, batch: Any) -> Any:
        if len(self.seen) == 3:
            # print may write the line in two pieces, and both ranks write into one pipe
            sys.stdout.write(f"training {os.getpid()}\n")
            sys.stdout.flush()
        return super().training_step(batch)


if __name__ == "__main__":
    loader = penstock.Loader.from_dataset(Tagged(24), batch_size=1, infinite=True, num_workers=2)
    new_trainer(2, [LightningCallback()], max_steps=10**9, enable_checkpointing=False).fit(Telling(), loader)
