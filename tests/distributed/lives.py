"""Run a training script several times, one life after another; some lives end with SIGKILL.

    python lives.py SCRIPT RANKS MODULES LIVES

It imports the script's modules and forks each life from there, so that a life costs one second instead of ten. MODULES are names, separated by
commas; LIVES is JSON, the arguments of each life. With more than one rank, it sets the environment variables that torchrun would set.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist


def live(script: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """In a fork: run the script, and exit."""
    code = 1
    try:
        os.environ.update(environment)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ends(script: str, ranks: int, life: int, arguments: list[str]) -> list[int]:
    """The exit codes of all ranks. A rank that dies takes the others with it."""
    environment = {}
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives as long as this call
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(life),
        }
    running: dict[int, int] = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            live(script, arguments, {**environment, "RANK": str(rank)} if ranks > 1 else {})
        running[pid] = rank
    codes = [0] * ranks
    while running:
        pid, status = os.wait()
        codes[running.pop(pid)] = code = os.waitstatus_to_exitcode(status)
        for other in running if code else ():
            os.kill(other, signal.SIGKILL)
    return codes


def main(script: str, ranks: int, modules: str, lives: list[list[str]]) -> None:
    for module in ("torch._dynamo", *modules.split(",")):  # every optimizer imports it, which takes a second
        importlib.import_module(module)
    for life, arguments in enumerate(lives):
        expected = [-signal.SIGKILL if "--die-after" in arguments else 0] * ranks
        codes = ends(script, ranks, life, arguments)
        assert codes == expected, f"life {life} with {arguments} ended with {codes}, and {expected} was expected"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
