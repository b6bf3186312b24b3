"""Example scripts of Accelerate and Diffusers do the same with an `AccelerateLoader`.

They are read from checkouts: PENSTOCK_ACCELERATE_EXAMPLES and PENSTOCK_DIFFUSERS_EXAMPLES name their folders of
examples.
"""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("transformers")

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.soak, pytest.mark.parametrize("ranks", [1, 2, 4])]

PROGRAM = Path(__file__).parent / "accelerate_examples.py"
KINDS = ("DataLoader", "penstock")
SAMPLES, BATCH_SIZE = 86, 4
SCRIPTS = [
    ["nlp_example.py"],
    ["complete_nlp_example.py", "--with_tracking", "--checkpointing_steps", "epoch"],
    ["complete_nlp_example.py", "--resume_from_checkpoint", "epoch_0"],
    ["by_feature/gradient_accumulation.py", "--gradient_accumulation_steps", 3],
    ["by_feature/multi_process_metrics.py"],  # gather
    ["by_feature/local_sgd.py"],
    ["by_feature/memory.py"],
]
DIFFUSION = "unconditional_image_generation/train_unconditional.py"
UNET = {
    "sample_size": 8,
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "add_attention": False,
}


@pytest.fixture
def run(ranks: int, tmp_path: Path, run_program: Callable[..., str]) -> Callable[..., list[Any]]:
    """Run scripts with a kind of loader, in a folder of that name; for each script, what each rank saw."""

    def run(kind: str, repository: str, runs: list[list[Any]]) -> list[Any]:
        if (variable := f"PENSTOCK_{repository}_EXAMPLES") not in os.environ:
            pytest.skip(f"{variable} does not name the folder of examples in a checkout")
        orders = json.dumps([[os.path.join(os.environ[variable], script), *map(str, words)] for script, *words in runs])
        (folder := tmp_path / kind).mkdir()
        environment = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        run_program(PROGRAM, kind, "told", orders, cwd=folder, ranks=ranks, **environment)
        told = [json.loads((folder / f"told.{rank}").read_text()) for rank in range(ranks)]
        return [*map(list, zip(*told, strict=True))]

    return run


def comparable(told: list[Any]) -> list[Any]:
    """All but the order of the samples in training, and the size of an epoch's last batch."""
    each = told[0]["lengths"][0][1][0]
    sizes = [[len(batch) for batch in rank["trained"]] for rank in told]
    return [
        {**rank, "trained": [size for k, size in enumerate(own, each - len(own) % each) if (k + 1) % each]}
        for rank, own in zip(told, sizes, strict=True)
    ]


def distinct(told: list[Any]) -> list[int]:
    """How many samples each epoch has, over all ranks."""
    each = told[0]["lengths"][0][1][0]
    begins = range(0, len(told[0]["trained"]), each)
    return [len({*chain(*chain(*(rank["trained"][k : k + each] for rank in told)))}) for k in begins]


def test_accelerates_scripts_do_the_same(ranks: int, run: Callable[..., list[Any]]) -> None:
    """The same learning rates, numbers and sizes of batches, lengths, weights, and gathered predictions in order."""
    told = [run(kind, "ACCELERATE", SCRIPTS) for kind in KINDS]
    for (script, *_), other, ours in zip(SCRIPTS, *told, strict=True):
        assert comparable(ours) == comparable(other), script
        assert distinct(ours) == distinct(other), script


def resumed(run: Callable[..., list[Any]], name: str, run_all: list[Any], path: str, updates: int, window: int) -> None:
    """Resume in the middle of the first epoch, at its end, and in the middle of the second: the same again, and with
    penstock the batches of the run that was not interrupted.

    Seen to fail: a run resumed at the end of an epoch had one epoch too few.
    """
    places = (updates // 2, updates, updates + updates // 2)
    saves_nothing = [*run_all, "--checkpointing_steps", 1000]
    runs = [run_all, *([*saves_nothing, "--resume_from_checkpoint", path.format(at)] for at in places)]
    told = [run(kind, name, runs) for kind in KINDS]
    for at, other, ours in zip((0, *places), *told, strict=True):
        assert comparable(ours) == comparable(other), at
    whole, *rest = told[1]
    batches = whole[0]["lengths"][0][1][0]
    for at, ours in zip(places, rest, strict=True):
        begin = batches * (at // updates) + at % updates * window
        assert [rank["trained"] for rank in ours] == [rank["trained"][begin:] for rank in whole], at


def test_a_script_resumes_by_a_stateful_loader(ranks: int, run: Callable[..., list[Any]]) -> None:
    run_all = ["complete_nlp_example.py", "--use_stateful_dataloader", "--checkpointing_steps", 1]
    resumed(run, "ACCELERATE", run_all, "step_{}", -(-SAMPLES // (BATCH_SIZE * ranks)), 1)


def test_diffusers(ranks: int, run: Callable[..., list[Any]], tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "pictures").mkdir()
    for number in range(SAMPLES):
        image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / "pictures" / f"{number:02}.png")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", **UNET}))
    words = {
        "train_data_dir": tmp_path / "pictures",
        "model_config_name_or_path": tmp_path / "unet",
        "cache_dir": tmp_path / "cache",
        "output_dir": ".",
        "resolution": 8,
        "train_batch_size": BATCH_SIZE,
        "eval_batch_size": 1,
        "ddpm_num_inference_steps": 2,
        "num_epochs": 3,
        "gradient_accumulation_steps": 2,
        "lr_warmup_steps": 3,
        "checkpointing_steps": 1,
    }
    run_all = [DIFFUSION, *chain(*((f"--{name}", value) for name, value in words.items())), "--random_flip"]
    updates = -(-SAMPLES // (2 * BATCH_SIZE * ranks))
    resumed(run, "DIFFUSERS", run_all, "checkpoint-{}", updates, 2)
