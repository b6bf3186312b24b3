"""Loses the head node of a cluster under a loop over a loader with workers there. Prints after how many seconds Ray has
ended the program."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ray.cluster_utils import Cluster

TRAINING = """
import sys, time, ray, penstock
ray.init(address=sys.argv[1], log_to_driver=False)
with penstock.Loader.from_dataset(range(10**6), batch_size=4, num_workers=1, method="ray", infinite=True) as loader:
    for k, batch in enumerate(loader):
        time.sleep(0.01)
        if k == 20:
            print("trains", flush=True)
"""


def main() -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, cluster.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert training.stdout is not None
    assert training.stdout.readline() == b"trains\n"
    began = time.monotonic()
    cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    code = training.wait(170)
    assert code != 0
    print(f"ended with {code}")
    print(time.monotonic() - began)


if __name__ == "__main__":
    main()
