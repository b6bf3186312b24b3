"""For robot learning on LeRobot datasets (version 3): windows of frames around each frame, and no frame twice or lost
when a job is killed.

python lerobot_windows.py --folder run  # then once more, with --resume
torchrun --nproc-per-node=2 lerobot_windows.py --folder run --resume  # on any number of ranks
python lerobot_windows.py --folder run --lerobot  # the same batches from LeRobotDataset, by LeRobot's own sampler
python lerobot_windows.py --folder run --video  # the frames in a video, which torchcodec decodes

The dataset is small, and made here: five episodes of a robot that carries its own index. It needs: pip install pandas
pillow pyarrow
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

FPS, EPISODES, IMAGE = 10, [13, 7, 18, 9, 16], "observation.image"
WINDOWS = {"observation.state": [-0.1, 0.0], IMAGE: [-0.1, 0.0], "action": [k / FPS for k in range(8)]}
"""LeRobot's ``delta_timestamps``: seconds from the frame, for each feature."""
DROPPED, BATCH, EPOCHS, SAVE_EVERY = 3, 8, 3, 4
"""``drop_n_last_frames`` of each episode, the rows of a step on all ranks together, epochs, and steps between
checkpoints.
"""


def make_dataset(root: Path, video: bool) -> None:
    """As LeRobot lays it out: frames as rows, several episodes in a file, and a table that says where each begins."""
    for folder in ("data", "meta/episodes", f"videos/{IMAGE}"):
        (root / folder / "chunk-000").mkdir(parents=True)
    total, begins = sum(EPISODES), np.cumsum([0, *EPISODES]).tolist()
    index, episode = np.arange(total), np.repeat(np.arange(len(EPISODES)), EPISODES)
    frame = index - np.array(begins)[episode]
    state = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([index, frame], 1).ravel().astype(np.float32)), 2)
    rows = {
        "observation.state": state,
        "action": state,
        "timestamp": (frame / FPS).astype(np.float32),
        "frame_index": frame,
    }
    rows.update(episode_index=episode, index=index, task_index=np.zeros(total, np.int64))
    pictures = [np.full((32, 48, 3), 4 * k, np.uint8) for k in range(total)]
    where: dict[str, Any] = {
        "episode_index": [*range(len(EPISODES))],
        "dataset_from_index": begins[:-1],
        "dataset_to_index": begins[1:],
    }
    where.update(
        {"data/chunk_index": [0] * 5, "data/file_index": [0, 0, 0, 1, 1], "length": EPISODES, "tasks": [["carry"]] * 5}
    )
    if video:
        from torchcodec.encoders import VideoEncoder

        where.update({f"videos/{IMAGE}/{name}_index": [0] * 5 for name in ("chunk", "file")})
        where[f"videos/{IMAGE}/from_timestamp"] = [begin / FPS for begin in begins[:-1]]
        frames = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
        VideoEncoder(frames, frame_rate=FPS).to_file(str(root / f"videos/{IMAGE}/chunk-000/file-000.mp4"))
    else:
        rows[IMAGE] = pa.array([{"bytes": png(one), "path": None} for one in pictures])
    for file, half in enumerate((slice(0, begins[3]), slice(begins[3], total))):
        pq.write_table(
            pa.table({name: column[half] for name, column in rows.items()}),
            root / f"data/chunk-000/file-{file:03}.parquet",
        )
    pq.write_table(pa.table(where), root / "meta/episodes/chunk-000/file-000.parquet")
    pd.DataFrame({"task_index": [0]}, index=["carry"]).to_parquet(root / "meta/tasks.parquet")
    features = {
        name: {"dtype": str(column.dtype), "shape": [1], "names": None}
        for name, column in rows.items()
        if name[0] in "tfei"
    }
    features.update(
        {name: {"dtype": "float32", "shape": [2], "names": None} for name in ("observation.state", "action")}
    )
    features[IMAGE] = {
        "dtype": "video" if video else "image",
        "shape": [32, 48, 3],
        "names": ["height", "width", "channels"],
    }
    numbers = {
        "total_episodes": len(EPISODES),
        "total_frames": total,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": FPS,
    }
    paths = {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    info = {
        "codebase_version": "v3.0",
        "robot_type": "none",
        **numbers,
        **paths,
        "splits": {"train": "0:5"},
        "features": features,
    }
    (root / "meta/info.json").write_text(json.dumps(info))


def png(pixels: Any) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Each frame with those around it, as LeRobotDataset gives it (but for the name of the task): before an episode and
    after it, its first or last frame, marked ``_is_pad``.
    """

    def __init__(self, root: Path, windows: dict[str, list[float]]) -> None:
        info = json.loads((root / "meta/info.json").read_text())
        self.kinds = {name: feature["dtype"] for name, feature in info["features"].items()}
        self.offsets = {name: [round(delta * info["fps"]) for delta in deltas] for name, deltas in windows.items()}
        self.rows = pq.read_table(root / "data", memory_map=True)
        self.episodes = pq.read_table(root / "meta/episodes").sort_by("episode_index").to_pylist()
        self.videos, self.fps = str(root / info["video_path"]), info["fps"]

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        episode = self.episodes[self.rows["episode_index"][index].as_py()]
        begin, end = episode["dataset_from_index"], episode["dataset_to_index"]
        item = {name: self.frames(name, [index], episode)[0] for name in self.kinds if name not in self.offsets}
        for name, offsets in self.offsets.items():
            item[name] = self.frames(name, [min(max(index + offset, begin), end - 1) for offset in offsets], episode)
            item[f"{name}_is_pad"] = torch.tensor([not begin <= index + offset < end for offset in offsets])
        return item

    def frames(self, name: str, indices: list[int], episode: dict[str, Any]) -> torch.Tensor:
        if self.kinds[name] == "video":
            chunk, file, start = (
                episode[f"videos/{name}/{which}"] for which in ("chunk_index", "file_index", "from_timestamp")
            )
            path = self.videos.format(video_key=name, chunk_index=chunk, file_index=file)
            seconds = [start + self.rows["timestamp"][k].as_py() for k in indices]
            numbers = [round(one * self.fps) for one in seconds]
            pixels: torch.Tensor = decoder(os.getpid(), threading.get_ident(), path).get_frames_at(numbers).data
            return pixels / 255
        values = [self.rows[name][k].as_py() for k in indices]
        if self.kinds[name] == "image":
            pictures = [np.asarray(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in values]
            return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
        return torch.tensor(values)


@lru_cache(maxsize=64)
def decoder(process: int, thread: int, path: str) -> Any:
    """One for each video, process and thread: it must not be shared."""
    from torchcodec.decoders import VideoDecoder

    return VideoDecoder(path)


class EpisodeSampler:
    """The frames of all episodes, shuffled, without the last of each: what LeRobot's EpisodeAwareSampler yields."""

    def __init__(self, episodes: list[dict[str, Any]], drop_n_last_frames: int) -> None:
        self.indices = [
            k
            for one in episodes
            for k in range(one["dataset_from_index"], one["dataset_to_index"] - drop_n_last_frames)
        ]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return (self.indices[k] for k in torch.randperm(len(self.indices)))


def make_loader(root: Path, ranks: int, lerobot: bool) -> penstock.Loader[Any]:
    """The sampler is read anew in each epoch, seeded by ``seed`` and the epoch, and dealt to the ranks."""
    data: Any
    sampler: Any
    if lerobot:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
        from lerobot.datasets.sampler import EpisodeAwareSampler

        data = LeRobotDataset("carry", root, delta_timestamps=WINDOWS)
        bounds = [data.meta.episodes[f"dataset_{which}_index"] for which in ("from", "to")]
        sampler = EpisodeAwareSampler(*bounds, drop_n_last_frames=DROPPED, shuffle=True)
    else:
        data = Windows(root, WINDOWS)
        sampler = EpisodeSampler(data.episodes, DROPPED)
    return penstock.Loader.from_dataset(data, batch_size=BATCH // ranks, sampler=sampler, seed=1, num_workers=1)


def train(arguments: argparse.Namespace, folder: Path, rank: int, ranks: int) -> None:
    """Imitation: from two states, the eight actions that follow. What is padded is not in the loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 16)
    trained: Any = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, step, file = make_loader(folder / "robot", ranks, arguments.lerobot), 0, folder / "checkpoint.pt"
    if arguments.resume and file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        print(f"rank {rank} of {ranks} continues after step {step}, in epoch {loader.epoch}", flush=True)
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            error = trained(batch["observation.state"].flatten(1) / 64).view(-1, 8, 2) - batch["action"] / 64
            real = ~batch["action_is_pad"][..., None]
            loss = (error.square() * real).sum() / real.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen = {
                name: batch[name].tolist()
                for name in ("index", "observation.state", "action", "action_is_pad", f"{IMAGE}_is_pad")
            }
            seen["image"] = (batch[IMAGE].mean((2, 3, 4)) * 255).round().long().tolist()
            with (folder / f"seen-{rank}.jsonl").open("a") as lines:
                lines.write(json.dumps({"step": step, **seen}) + "\n")
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
    loader.close()
    print(f"rank {rank}: loss {loss.item():.3f} after {step} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lerobot", action="store_true")
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and arguments.folder is None:
        parser.error("several ranks need --folder, where all of them find the dataset")
    if ranks > 1:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        if rank == 0 and not (folder / "robot").exists():
            make_dataset(folder / "robot", arguments.video)
        if ranks > 1:
            dist.barrier()
        train(arguments, folder, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
