"""For language models: nanochat's data, texts in Parquet, tokenised and packed into full rows for several ranks; killed
at any point, the run resumes bit for bit.

python port_nanochat.py                                        # needs: pip install '.[formats]' tokenizers
torchrun --nproc-per-node=2 port_nanochat.py --resume          # continues from the last checkpoint, if there is one

As there (https://github.com/karpathy/nanochat, nanochat/dataloader.py): a row begins with a beginning of a text, texts
that fit well share a row, and what is left of it is filled with the beginning of a short one. There, a resume goes on
with the next row group, so it leaves out and repeats texts, and what waited to be packed is lost. The lines between the
two rulers are the whole loader.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS, GLOBAL_BATCH, SAVE_EVERY, CONTEXT, VOCABULARY = 3, 4, 4, 64, 300

# ----------------------------------------------------------------------------------------------------------------------


class Tokenize:
    """A step: rows with a text become lists of tokens; many at a time, because the tokenizer works on those in threads
    of its own.
    """

    def __init__(self, file: str, at_once: int = 128) -> None:
        self.file = file
        self.at_once = at_once

    def __call__(self, rows: Iterator[dict[str, str]]) -> Iterator[list[int]]:
        tokenizer = Tokenizer.from_file(self.file)  # puts a <bos> before each text
        texts: list[str] = []
        for row in rows:
            texts.append(row["text"])
            if len(texts) == self.at_once:
                yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(texts))
                texts = []
        yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(texts))


def loader_of(folder: Path, batch_size: int, workers: int) -> penstock.Loader:
    """Batches of ``{"tokens": int64 of shape (batch_size, CONTEXT + 1), …}``, the same for any number of ranks and
    workers.
    """
    data = penstock.formats.parquet(
        folder / "*.parquet",
        ["text"],
        unit="file",  # what waits to be packed at the end of a shard is dropped, so shards are as long as possible
        lanes=4,
        epoch_size=GLOBAL_BATCH * 8,
        steps=[Tokenize(str(folder / "tokenizer.json")), penstock.Pack(CONTEXT + 1, crop=True, window=1000)],
        bookmarks=folder / "bookmarks",
    )
    # Rows come in bursts, as many as 128 texts make, so more is read ahead than usual: no worker waits while another is
    # tokenising.
    return penstock.Loader.from_dataset(
        data, batch_size=batch_size, shuffle=True, seed=1, num_workers=workers, prefetch_factor=16
    )


# ----------------------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """Train from the beginning, or from the last checkpoint."""
    rank, folder = dist.get_rank(), arguments.folder
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Dropout(0.1), nn.Linear(16, VOCABULARY))
    )
    torch.manual_seed(100 + rank)  # each rank has its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = loader_of(folder, GLOBAL_BATCH // dist.get_world_size(), arguments.workers)

    step, file = 0, folder / "checkpoint.pt"
    if not arguments.resume:
        (folder / f"records-{rank}.jsonl").unlink(missing_ok=True)
    elif file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["rng"][rank])
        record(folder, resumed=saved["at"])
        print(f"rank {rank} continues after {saved['at']}, in epoch {loader.epoch}", flush=True)

    def save(at: str) -> None:
        """The loader's state is the same on all ranks; the random state is not."""
        rng: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0:
            parts = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            torch.save({"at": at, "step": step, "rng": rng, **parts}, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
        dist.barrier()

    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            tokens = batch["tokens"]
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record(folder, at=f"step-{step}", tokens=tokens.tolist(), loss=loss.item())
            if step % SAVE_EVERY == 0:
                save(f"step-{step}")
            die(arguments, f"step-{step}")
        record(folder, at=f"epoch-{epoch}")
        if rank == 0:
            print(f"epoch {epoch} ends after step {step}", flush=True)
        save(f"epoch-{epoch}")
        die(arguments, f"epoch-{epoch}")
    loader.close()


def write_corpus(folder: Path, files: int = 8, texts: int = 60) -> None:
    """Made-up texts of some 3 to 150 words, in Parquet files with row groups of 20 texts, and a tokenizer trained on
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    words = np.array(["".join(generator.choice(list("abcdefghij"), generator.integers(2, 9))) for _ in range(500)])
    lengths = generator.lognormal(3, 0.8, (files, texts)).astype(int) + 3
    corpus = [[" ".join(words[generator.zipf(1.5, length) % 500]) for length in of_file] for of_file in lengths]
    for number, of_file in enumerate(corpus):
        pq.write_table(pa.table({"text": of_file}), folder / f"{number:03}.parquet", row_group_size=20)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<bos>"], show_progress=False)
    tokenizer.train_from_iterator((text for of_file in corpus for text in of_file), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def record(folder: Path, **values: object) -> None:
    """One line of JSON in this rank's file, to the last bit."""
    with (folder / f"records-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def die(arguments: argparse.Namespace, place: str) -> None:
    """Die like a machine that is preempted."""
    if arguments.die_after == place:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder", type=Path, default=Path("port_nanochat_run"), help="for the texts, the checkpoint and the records"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--die-after", metavar="PLACE", help="step-N or epoch-N: die after it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0 and not (arguments.folder / "tokenizer.json").exists():
        write_corpus(arguments.folder)
    dist.barrier()
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
