"""For training hosts with too few CPUs: the workers of a loader run on the nodes of a Ray cluster, and deliver the same
batches as without them.

pip install ".[ray]"
python examples/ray_workers.py            # starts Ray on this machine, or joins the cluster that RAY_ADDRESS names
"""

from __future__ import annotations

import argparse
import hashlib
import io
import time

import numpy as np
import ray
import torch

import penstock


class Pictures:
    """Stands for files to decode and augment: sample ``i`` is a compressed array of ``side`` by ``side`` pixels."""

    def __init__(self, samples: int, side: int) -> None:
        self.samples, self.side = samples, side

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        packed = io.BytesIO()
        np.savez_compressed(packed, pixels=np.random.default_rng(i).integers(0, 8, (self.side, self.side, 3), np.uint8))
        pixels = np.load(io.BytesIO(packed.getvalue()))["pixels"]
        flipped = (
            pixels[:, ::-1] if penstock.sample().rng.random() < 0.5 else pixels
        )  # the sample's own random numbers: the same on any machine
        return torch.from_numpy(flipped.copy()).permute(2, 0, 1), i


def read(data: Pictures, **workers: object) -> str:
    """Read one epoch; the digest of all that came."""
    digest, began = hashlib.sha256(), time.perf_counter()
    with penstock.Loader.from_dataset(data, batch_size=32, shuffle=True, **workers) as loader:
        for pixels, labels in loader:
            digest.update(pixels.numpy().tobytes() + labels.numpy().tobytes())
        print(f"{loader!r:.80}: {time.perf_counter() - began:.2f} s, {digest.hexdigest()[:16]}")
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    ray.init(log_to_driver=False)
    data = Pictures(args.samples, args.side)
    here = read(data)
    there = read(data, num_workers=args.workers, method="ray", ray_options={"num_cpus": 1})
    assert here == there
    print(
        f"{args.workers} workers on {len(ray.nodes())} node(s) gave the same {args.samples} samples, in the same "
        f"order, byte for byte."
    )


if __name__ == "__main__":
    main()
