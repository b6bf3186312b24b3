"""Run the mmengine recipe of docs/trainers/index.md against the real package: mmengine_recipe.py PAGE FOLDER."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # mmengine 0.10 cannot load its own checkpoints otherwise

import torch  # noqa: E402
from mmengine.model import BaseModel  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

import penstock  # noqa: E402
from penstock.testing import Tagged  # noqa: E402

recipe: dict[str, Any] = {}
exec(Path(sys.argv[1]).read_text().partition("<!-- mmengine -->")[2].partition("```py\n")[2].partition("```")[0], recipe)


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, batch: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        self.seen.append(batch.tolist())
        return {"loss": self.layer(batch.float().unsqueeze(1)).mean() / 1000}

    def train_step(self, data: torch.Tensor, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        losses = self.forward(data)
        optim_wrapper.update_params(losses["loss"])
        return losses


def train(folder: Path, by_epoch: bool, resume: Path | None = None) -> list[list[int]]:
    model = Model()
    with penstock.Loader.from_dataset(Tagged(48), batch_size=4, shuffle=True, seed=3) as loader:
        Runner(
            model,
            str(folder),
            train_dataloader=recipe["MMEngineLoader"](loader, Tagged(48), by_epoch),
            train_cfg={"by_epoch": True, "max_epochs": 3} if by_epoch else {"by_epoch": False, "max_iters": 30},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-6}},
            custom_hooks=[recipe["PenstockHook"]()],
            default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 18}},
            load_from=None if resume is None else str(resume),
            resume=resume is not None,
            log_level="ERROR",
            experiment_name=f"{by_epoch} {resume is None}",
        ).train()
    return model.seen


for by_epoch in (False, True):
    folder = Path(sys.argv[2]) / str(by_epoch)
    whole = train(folder, by_epoch)
    assert len(whole) == (36 if by_epoch else 30)
    assert train(folder, by_epoch, folder / "iter_18.pth") == whole[18:]
