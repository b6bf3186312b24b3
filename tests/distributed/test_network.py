"""Two hosts, as far as one machine allows: two network namespaces joined by a veth pair, with one torchrun node in each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torchrun import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

DISTRIBUTED = Path(__file__).parent


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable in it."""

    name: str
    interface: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def received(self) -> int:
        """Bytes that came over the cable."""
        counter = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(subprocess.run([*self.inside, "cat", counter], check=True, capture_output=True, text=True).stdout)


def ip(*words: str) -> None:
    """Run ``ip``, or skip the test if this machine does not permit it."""
    made = subprocess.run(["ip", *words], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: `ip {' '.join(words)}` says {made.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command, which is in the package iproute2")
    here = f"pst{os.getpid() % 10**6}"
    both = [Host(f"{here}{end}", f"{here}{end}", f"10.213.77.{k}") for k, end in ((1, "a"), (2, "b"))]
    with ExitStack() as stack:
        for host in both:
            ip("netns", "add", host.name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", host.name], check=True)  # this removes the cable too
        a, b = both
        ip("link", "add", a.interface, "netns", a.name, "type", "veth", "peer", "name", b.interface, "netns", b.name)
        for host in both:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.name, "link", "set", host.interface, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield both


@pytest.mark.slow
@pytest.mark.soak
def test_the_laws_hold_over_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    idle = [host.received() for host in hosts]
    with ExitStack() as stack:
        nodes = []
        for k, host in enumerate(hosts):
            rendezvous = ["--nnodes", 2, "--node-rank", k, "--master-addr", hosts[0].address, "--master-port", 29500]
            arguments = [*rendezvous, "--local-addr", host.address, "--nproc-per-node", 2, DISTRIBUTED / "rank_laws.py"]
            node = Launch(tmp_path, host.name, arguments, before=host.inside, GLOO_SOCKET_IFNAME=host.interface)
            stack.callback(node.end)
            nodes.append(node)
        for node in nodes:
            node.wait(400)
    assert len(set(re.findall(r"good: \w+\n", nodes[0].said()))) == 22, "as on four ranks of one host"
    assert all(host.received() - before > 100_000 for host, before in zip(hosts, idle, strict=True))  # the data went over the cable
