"""For fine-tuning a model like Qwen2.5-VL on chats with pictures: packed rows, a second budget for pictures, positions
of three rows. Killed at any step, it goes on.

python finetune_pictures.py --folder run                                     # then once more, with --resume
torchrun --nproc-per-node=2 finetune_pictures.py --folder run --resume       # on any number of ranks

The chats are random, and the model is tiny: put your processor in place of `Chats`. It needs: pip install
'.[transformers]'
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import penstock

IMAGE, PATCH, CAPACITY, MOST_PICTURES = 90, 3 * 2 * 2 * 2, 64, 4
STEPS, ROWS, SAVE_EVERY = 10, 2, 2
EMPTY = {"pixel_values": torch.empty(0, PATCH), "image_grid_thw": torch.empty(0, 3, dtype=torch.int64)}
"""What a chat without pictures has: nothing, but of the right shape and type."""

Sample = dict[str, torch.Tensor]


def tiny_model() -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    text: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    vision |= {
        "patch_size": 2,
        "window_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=91)
    return Qwen2_5_VLForConditionalGeneration(config)


class Chats(Dataset[Sample]):
    """What a processor makes of a chat: tokens, with placeholders for pictures; the patches of the pictures, if there
    are any; and positions.

    ``get_rope_index`` is the model's own function from tokens and pictures to positions in time, height and width.
    """

    def __init__(self, get_rope_index: Any) -> None:
        self.get_rope_index = get_rope_index

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng(index)
        grids = [(1, 2 * int(rng.integers(2, 4)), 4) for _ in range(rng.integers(0, 3))]
        words = [rng.integers(3, 80, rng.integers(2, 12))]
        for time, height, width in grids:
            words += [np.full(time * height * width // 4, IMAGE), rng.integers(3, 80, 2)]
        tokens = torch.from_numpy(np.concatenate(words))
        sample = {"input_ids": tokens, "labels": torch.where(tokens == IMAGE, -100, tokens)}
        if grids:
            sample["image_grid_thw"] = torch.tensor(grids)
            patches = sum(time * height * width for time, height, width in grids)
            sample["pixel_values"] = torch.from_numpy(rng.normal(size=(patches, PATCH)).astype(np.float32))
        mrope, _ = self.get_rope_index(
            tokens[None], (tokens[None] == IMAGE).int(), image_grid_thw=sample.get("image_grid_thw")
        )
        # Four rows: the place in the chat, by which transformers keeps the chats of a row apart, and time, height and
        # width.
        sample["position_ids"] = torch.cat([torch.arange(len(tokens))[None], mrope[:, 0]])
        return sample


def tokens_of(sample: Sample) -> int:
    return len(sample["input_ids"])


def pictures_of(sample: Sample) -> int:
    return len(sample.get("image_grid_thw", ()))


def packed(model: Any, folder: Path, rows: int) -> penstock.Loader[Sample]:
    """Rows of 64 tokens and at most four pictures; a picture is never cut."""
    chats = Chats(model.model.get_rope_index)
    packs = penstock.Packs(
        penstock.lengths(chats, tokens_of, folder / "tokens"),
        CAPACITY,
        along=EMPTY,
        also={"image_grid_thw": (penstock.lengths(chats, pictures_of, folder / "pictures"), MOST_PICTURES)},
        cu_seqlens=True,
        pad={"labels": -100},
    )
    return penstock.Loader.from_dataset(chats, rows, groups=packs, shuffle=True, seed=1)


def loss_of(model: Any, batch: Sample) -> torch.Tensor:
    pictures = {name: batch[name] for name in EMPTY} if len(batch["image_grid_thw"]) else {}
    logits = model(
        batch["input_ids"], position_ids=batch["position_ids"].movedim(1, 0), use_cache=False, **pictures
    ).logits
    targets = batch["labels"].roll(-1, 1)
    # the last token of a chat does not predict the first of the next
    targets.view(-1)[batch["cu_seqlens"][1:].long() - 1] = -100
    loss: torch.Tensor = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss


def train(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    folder, model = arguments.folder, tiny_model()
    trained: Any = (
        DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
    )  # a row of text leaves the encoder unused
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, step, file = packed(model, folder, ROWS // ranks), 0, folder / "checkpoint.pt"
    if arguments.resume and file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        print(f"rank {rank} of {ranks} continues after step {step}", flush=True)
    while step < STEPS:
        for batch in loader:
            loss = loss_of(trained, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen = {"step": step, "rows": batch["input_ids"].tolist(), "pictures": len(batch["image_grid_thw"])}
            with (folder / f"rows-{rank}.jsonl").open("a") as lines:
                lines.write(json.dumps(seen) + "\n")
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                torch.save(state, folder / "new.pt")
                os.replace(folder / "new.pt", file)
            if step == arguments.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break
    loader.close()
    print(f"rank {rank}: loss {loss.item():.3f} after {step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    arguments.folder.mkdir(exist_ok=True)
    train(arguments, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
