"""Programs run as forks of one process that has imported torch, and what else they import, so that a program costs no
import.

`Programs` is the side of the tests; this file as a script is the server, which forks. A program is ``__main__`` there,
with its own arguments, folder and environment, and the interpreter ends with it, as if it had been started. It may also
run on several ranks, with torchrun's variables.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from sessions import MARK, end_with_stacks, kill_marked, marked, session, started_by

IMPORTS = {
    "torch": ["torch", "torchdata.nodes"],
    "checkpoint": ["torch.distributed.checkpoint.state_dict"],
    "distributed": ["torch._dynamo", "torch.distributed.device_mesh"],
    "penstock": ["penstock._loader.loader"],
    "optim": ["torch._dynamo"],  # every optimizer imports it
    "sklearn": ["sklearn.datasets"],
    "matplotlib": ["matplotlib.pyplot"],
    "lightning": ["torch._dynamo", "lightning.pytorch", "lightning.fabric"],
    "accelerate": ["accelerate"],
    "transformers": ["torch._dynamo", "transformers.trainer"],
    "SFTTrainer": ["trl.trainer.sft_trainer"],
    "RepeatSampler": ["trl.trainer.utils"],
    "datasets": ["datasets"],
    "pyarrow": ["pyarrow.parquet"],
    "torch_geometric": ["torch_geometric"],
}


class Programs:
    """The server, and the program that it runs now. It hangs below no test: a test that counts its own processes does
    not see it.

    Args:
        imports: A word in a program, and what the server imports before it forks one.
    """

    def __init__(self, imports: dict[str, list[str]] = IMPORTS) -> None:
        self.imports = imports
        self.process: Any = None
        self.pid = 0
        self.busy = False
        self.running: list[int] = []

    def start(self) -> None:
        """Start a server, or another one once it has died.

        A program has one thread for the operators of torch, which asks for that number where it is imported. More of
        them, of several ranks, and of other tests, would wait for each other in loops that take all cores.
        """
        self.stop()
        command, environment = [sys.executable, __file__], {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.process.wait()  # for the process between, which has ended
        self.pid = self._told(100)

    def stop(self) -> None:
        """Let the server end."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
        self.process, self.pid = None, 0

    def run(
        self,
        script: Path,
        *arguments: object,
        cwd: Path,
        ranks: int = 0,
        deadline_s: float = 200,
        killed: bool = False,
        code: int = 0,
        **environment: str,
    ) -> str:
        """What a program wrote, stderr included; it runs to its end, on so many ranks (0: without a rank's variables).

        It must end well (or by SIGKILL, if ``killed``; or with another ``code``), within ``deadline_s`` seconds, and
        leave no process. When one rank fails, the others are killed.
        """
        if not psutil.pid_exists(self.pid):
            self.start()
        mark, name = uuid4().hex, Path(script).name
        output = cwd / f"output-{mark}.txt"
        output.touch()
        words = re.findall(r"\w+", Path(script).read_text())
        order = {
            "script": str(script),
            "arguments": [*map(str, arguments)],
            "cwd": str(cwd),
            "ranks": ranks,
            "output": str(output),
            "environment": {**os.environ, **environment, MARK: mark},
            "imports": [module for word, modules in self.imports.items() if word in words for module in modules],
        }
        codes, self.busy = None, True
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
            self.running = self._told(deadline_s)
            codes = self._told(deadline_s)
            _, left = psutil.wait_procs(self.started(mark), timeout=100)
            end_with_stacks(left)
        except TimeoutError:
            end_with_stacks(self.started(mark))
            raise AssertionError(f"{name} has not ended after {deadline_s} s. It said:\n{output.read_text()}") from None
        except EOFError:
            psutil.wait_procs(self.started(mark), timeout=10)  # they are ended too, and tell where they are
            raise AssertionError(
                f"{name} has not ended, and what ran it is dead. It said:\n{output.read_text()}"
            ) from None
        finally:
            for one in self.started(mark):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            kill_marked(mark)
            self.busy, self.running = False, []
            if codes is None:
                self.start()  # whatever the old one is about to say
        expected = [-signal.SIGKILL if killed else code] * max(1, ranks)
        assert codes == expected, f"{name} ended with {codes}:\n{output.read_text()}"
        assert not left, f"{name} left processes behind: {left}\n{output.read_text()}"
        return output.read_text()

    def started(self, mark: str) -> list[psutil.Process]:
        """The processes of a program: the sessions of the forks, and what carries its mark."""
        return [*{*marked(mark), *(process for pid in self.running for process in session(pid))}]

    def everyone(self) -> list[psutil.Process]:
        """While a program runs: the server and all below it."""
        if not self.busy:
            return []
        return [
            psutil.Process(self.pid),
            *started_by(self.pid),
            *(process for pid in self.running for process in session(pid)),
        ]

    def _told(self, deadline_s: float) -> Any:
        if not select.select([self.process.stdout], [], [], deadline_s)[0]:
            raise TimeoutError
        if not (line := self.process.stdout.readline()):
            self.pid = 0
            raise EOFError("the server of programs has died")
        return json.loads(line)


def serve() -> None:
    """Fork what is ordered, one program after another. In a fork it returns once the program has ended."""
    if os.fork():
        os._exit(0)
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def tell(what: Any) -> None:
        replies.write(json.dumps(what).encode() + b"\n")
        replies.flush()

    tell(os.getpid())
    for life, line in enumerate(orders):
        order = json.loads(line)
        for module in order["imports"]:
            with suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()  # a fork that ends would look at all of it, several times
        variables, ranks = [{}], order["ranks"]
        if ranks:
            store, port, end = _store()
            variables = [_of_rank(rank, ranks, port, life) for rank in range(ranks)]
        pids: list[int] = []
        for own in variables:
            if (pid := os.fork()) == 0:
                orders.close()
                replies.close()
                return _become(order, own)
            pids.append(pid)
        tell(pids)
        codes, running = dict.fromkeys(pids, 0), {*pids}
        while running:
            pid, status = os.wait()
            if pid in running:
                running.remove(pid)
                codes[pid] = code = os.waitstatus_to_exitcode(status)
                for other in running if code else ():
                    os.kill(other, signal.SIGKILL)
        if ranks:
            os.close(end)
            os.waitpid(store, 0)
        tell([*codes.values()])


def _store() -> tuple[int, int, int]:
    """A process where the ranks meet, its port, and the file by whose closing it ends. It has threads, which a fork
    must not inherit."""
    told, tells = os.pipe()
    ends, end = os.pipe()
    if pid := os.fork():
        os.close(tells)
        os.close(ends)
        with os.fdopen(told) as port:
            return pid, int(port.read()), end
    from torch.distributed import TCPStore

    os.close(end)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tells, str(store.port).encode())
    os.close(tells)
    os.read(ends, 1)
    os._exit(0)


def _of_rank(rank: int, ranks: int, port: int, life: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    named = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(life),
        "OMP_NUM_THREADS": "1",
    }
    return {**{name: str(number) for name, number in numbers.items()}, **named}


def _become(order: dict[str, Any], variables: dict[str, str]) -> None:
    """Run a program in this process, as its ``__main__``."""
    os.setsid()
    sink = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    for fd, into in ((os.open(os.devnull, os.O_RDONLY), 0), (sink, 1), (sink, 2)):
        os.dup2(fd, into)
    os.close(sink)
    os.environ.clear()
    os.environ.update({**order["environment"], **variables})
    os.chdir(order["cwd"])
    if "numpy" in sys.modules:
        # torch has the same seed in every new process, and Python sees the fork itself
        sys.modules["numpy"].random.seed()
    script = order["script"]
    sys.argv = [script, *order["arguments"]]
    sys.path[0] = str(Path(script).parent)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


if __name__ == "__main__":
    serve()
