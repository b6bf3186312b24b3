"""Many containers limit /dev/shm to 64 MB. Batches are not stored there, so its size does not matter."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import numpy as np, torch
from torch.utils.data import Dataset
import penstock


class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.full(1_000_000, index, np.float32)


if __name__ == "__main__":
    before = os.statvfs("/dev/shm")
    assert before.f_blocks * before.f_frsize == 2**20, "the small one is not there"
    with penstock.Loader.from_dataset(Images(), batch_size=4, num_workers=2, method="process") as loader:
        for _ in range(2):
            kept = list(loader)  # 96 MB
            assert [batch[:, 7].tolist() for batch in kept] == [[4.0 * k + j for j in range(4)] for k in range(6)]
    assert os.statvfs("/dev/shm").f_bfree == before.f_bfree
    assert os.listdir("/dev/shm") == []
    print("fine")
"""


def in_a_small_world(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run in a mount namespace whose /dev/shm has 1 MiB."""
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command],
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.mark.slow
def test_a_tiny_dev_shm_does_no_harm(tmp_path):
    """Batches of 16 MB, 96 MB of which are kept. Seen to fail with slots in /dev/shm, and with slots not reserved
    (SIGBUS)."""
    if shutil.which("unshare") is None or in_a_small_world(["true"]).returncode:
        pytest.skip("this machine does not allow a mount namespace")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = in_a_small_world([sys.executable, str(script)])
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
