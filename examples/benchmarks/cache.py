"""For who reads shards from an object store: what copies on the local disk are worth, beside those of MosaicML
Streaming and LitData.

    python cache.py [--loaders NAME ...] [--bounds 1 2 10 50 100] [--rounds 1] [--shards 48] [--shard-mb 2] [--docs
    PAGE]

A server on this machine speaks as much of S3 as these loaders ask for, answers each request after --latency-ms, and
sends all answers together at --mb-per-s. A loop with a step for each batch wants the data at that speed divided by 1.2.
Every loader reads --epochs epochs in a process of its own, with two worker processes. The bound is the share of the
data that may be on the disk. Then a process is killed (SIGKILL, with all its workers) while it fetches, and another one
begins again in its folder.

Bytes are counted at the server: 1.0 is all the data once. "wrong" counts samples of an epoch that came twice or not at
all. Whoever needs more than --timeout hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

RECORDS = 100  # in a shard
BATCH = 20
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}


# ------------------------------------------------------------------------------------------------------------ the store


class Store(ThreadingHTTPServer):
    """The files of a folder as the objects of the bucket ``data``."""

    daemon_threads = True

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Object)
        self.folder, self.latency_s, self.bytes_per_s = folder, latency_s, bytes_per_s
        self.requests = self.bytes = 0
        self.lock = threading.Lock()
        self.free_at = 0.0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever was killed has gone away."""

    def wait_for(self, nbytes: int) -> None:
        """Until the line has room for as many more bytes."""
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + nbytes / self.bytes_per_s
            self.bytes += nbytes
            due = self.free_at
        time.sleep(max(0.0, due - time.monotonic()))


class _Object(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        url = urlsplit(self.path)
        time.sleep(self.server.latency_s)
        if url.path == "/counts":
            return self._say(200, json.dumps([self.server.requests, self.server.bytes]).encode(), send=True)
        with self.server.lock:
            self.server.requests += 1
        key = unquote(url.path).removeprefix("/data").strip("/")
        file = self.server.folder / key
        if "list-type" in parse_qs(url.query) or not key:
            return self._list(parse_qs(url.query), send)
        if not file.is_file():
            return self._say(404, b"<Error><Code>NoSuchKey</Code></Error>", send=send)
        size, said = file.stat().st_size, self.headers.get("Range")
        begin, end = 0, size
        if said:
            first, last = said.removeprefix("bytes=").split("-")
            begin, end = int(first), min(size, int(last) + 1 if last else size)
        headers = {
            "ETag": f'"{hashlib.md5(key.encode()).hexdigest()}"',
            "Accept-Ranges": "bytes",
            "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT",
        }
        if said:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._begin(206 if said else 200, end - begin, headers)
        with file.open("rb") as data:
            data.seek(begin)
            while send and begin < end and (part := data.read(min(2**16, end - begin))):
                self.server.wait_for(len(part))
                self.wfile.write(part)
                begin += len(part)
        return None

    def _list(self, query: dict[str, list[str]], send: bool) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        files, folders = [], set()
        for file in sorted(self.server.folder.rglob("*")):
            key = str(file.relative_to(self.server.folder))
            if file.is_file() and key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                if found:
                    folders.add(prefix + head + delimiter)
                else:
                    files.append((key, file.stat().st_size))
        said = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(key.encode()).hexdigest()}&quot;</ETag>"
            f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, size in files
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        head = (
            f"<Name>data</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(files) + len(folders)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>"
        )
        xml = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{head}{said}</ListBucketResult>'
        )
        self._say(200, xml.encode(), send=send, headers={"Content-Type": "application/xml"})

    def _begin(self, status: int, nbytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        # Closed after each answer to Boto3: MosaicML Streaming 0.13 makes its client before it forks the workers, and
        # they would share a connection that is kept open. Without TLS each then gets the other's answers, and writes
        # one shard's bytes under another's name.
        closed = {"Connection": "close"} if "Boto3" in self.headers.get("User-Agent", "") else {}
        for name, value in {"Content-Length": str(nbytes), **closed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _say(self, status: int, body: bytes, *, send: bool, headers: dict[str, str] | None = None) -> None:
        self._begin(status, len(body), headers or {})
        if send:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path, latency_s: float, bytes_per_s: float, said: Any) -> None:
    with Store(folder, latency_s, bytes_per_s) as store:
        said.send(store.server_port)
        store.serve_forever()


# ---------------------------------------------------------------------------------------------------------- the loaders


def content(number: int, size: int) -> bytes:
    """Of a sample: its number, and bytes that do not compress."""
    return number.to_bytes(8, "little") + os.urandom(size - 8)


def number_of(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def write_tars(folder: Path, shards: int, size: int) -> None:
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for n in range(RECORDS):
                member = tarfile.TarInfo(f"{n:03}.bin")
                member.size = size
                tar.addfile(member, io.BytesIO(content(RECORDS * shard + n, size)))


def read_tars(port: int, folder: Path, most: int, shards: int) -> Any:
    import penstock

    storage = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
    paths = [f"s3://data/tars/{shard:05}.tar" for shard in range(shards)]
    data = penstock.formats.tar(
        paths,
        counts=[RECORDS] * shards,
        storage_options=storage,
        cache_dir=folder,
        max_cache_size=most,
        transform=number_of_member,
    )
    return penstock.Loader.from_dataset(data, batch_size=BATCH, shuffle=True, seed=1, num_workers=2, method="process")


def number_of_member(sample: Any) -> int:
    return number_of(sample["bin"])


def write_mds(folder: Path, shards: int, size: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"data": "bytes"}, size_limit=(size + 12) * RECORDS) as writer:
        for number in range(shards * RECORDS):
            writer.write({"data": content(number, size)})


def read_mds(port: int, folder: Path, most: int, shards: int) -> Any:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Numbers(StreamingDataset):
        def __getitem__(self, at: int) -> int:
            return number_of(super().__getitem__(at)["data"])

    os.environ["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    clean_stale_shared_memory()
    data = Numbers(
        remote="s3://data/mds", local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH, cache_limit=most
    )
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=2)


def samples_of(size: int, shard: int) -> Any:
    for n in range(RECORDS):
        yield content(RECORDS * shard + n, size)


def write_litdata(folder: Path, shards: int, size: int) -> None:
    from litdata import optimize

    optimize(
        functools.partial(samples_of, size),
        list(range(shards)),
        str(folder),
        chunk_size=RECORDS,
        num_workers=1,
        verbose=False,
    )


def read_litdata(port: int, folder: Path, most: int, shards: int) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    storage = {"endpoint_url": f"http://127.0.0.1:{port}"}
    data = StreamingDataset(
        "s3://data/litdata",
        cache_dir=str(folder),
        max_cache_size=most,
        shuffle=True,
        seed=1,
        storage_options=storage,
        transform=number_of,
    )
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=2)


LOADERS = {
    "penstock": ("penstock", write_tars, read_tars, "tars"),
    "MosaicML Streaming": ("streaming", write_mds, read_mds, "mds"),
    "LitData": ("litdata", write_litdata, read_litdata, "litdata"),
}


def train(chosen: argparse.Namespace) -> None:
    """In a process of its own: read the epochs, and print what came and when."""
    _, _, read, _ = LOADERS[chosen.train]
    loader = read(chosen.port, Path(chosen.folder), chosen.most, chosen.shards)
    for _ in range(chosen.epochs):
        begun, first, numbers, slow = time.monotonic(), None, [], 0.0
        asked = begun
        for batch in loader:
            now = time.monotonic()
            slow += now - asked if first is not None else 0.0
            first = first or now - begun
            numbers += [int(number) for number in batch]
            time.sleep(chosen.step_s)
            asked = time.monotonic()
        times = Counter(numbers)
        wrong = sum(abs(times[number] - 1) for number in range(chosen.shards * RECORDS)) + sum(
            times[number] for number in times if number >= chosen.shards * RECORDS
        )
        print(
            json.dumps({"s": time.monotonic() - begun, "first_s": first, "waited_s": slow, "wrong": wrong}), flush=True
        )
    if hasattr(loader, "close"):
        loader.close()


# -------------------------------------------------------------------------------------------------------- the questions


class Asked:
    def __init__(self, chosen: argparse.Namespace, port: int, nbytes: dict[str, int]) -> None:
        self.chosen, self.port, self.nbytes = chosen, port, nbytes
        self.step_s = (
            BATCH * 1.2 * sum(nbytes.values()) / len(nbytes) / (chosen.shards * RECORDS) / (chosen.mb_per_s * 1e6)
        )

    def fetched(self) -> float:
        from urllib.request import urlopen

        with urlopen(f"http://127.0.0.1:{self.port}/counts") as answer:
            return float(json.load(answer)[1])

    def start(self, name: str, folder: str, bound: float, epochs: int) -> subprocess.Popen[str]:
        most = int(self.nbytes[name] * bound)
        options = {
            "train": name,
            "port": self.port,
            "folder": folder,
            "most": most,
            "shards": self.chosen.shards,
            "epochs": epochs,
            "step-s": self.step_s,
        }
        command = [
            sys.executable,
            __file__,
            *(word for option, value in options.items() for word in (f"--{option}", str(value))),
        ]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **KEYS},
        )

    def ended(self, process: subprocess.Popen[str]) -> tuple[list[dict[str, float]], str]:
        """The epochs that it has read, and why there are no more."""
        try:
            out, err = process.communicate(timeout=self.chosen.timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            out, err = process.communicate()
            return [json.loads(line) for line in out.splitlines() if line.startswith("{")], "hangs"
        epochs = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        kill(process)  # what is left of its group
        return epochs, "" if process.returncode == 0 else (err.strip().splitlines() or ["?"])[-1][:90]

    def at_bound(self, name: str, bound: float) -> str:
        """One row of the table."""
        with tempfile.TemporaryDirectory() as folder:
            before = self.fetched()
            epochs, why = self.ended(self.start(name, folder, bound, self.chosen.epochs))
            share = (self.fetched() - before) / self.nbytes[name]
            taken = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / self.nbytes[name]
        if len(epochs) < self.chosen.epochs:
            return f"| {name} | {bound:.0%} | {why or 'ended early'} | | | | | |"
        waits = ", ".join(f"{epoch['waited_s']:.1f}" for epoch in epochs)
        seconds = ", ".join(f"{epoch['s']:.1f}" for epoch in epochs)
        return (
            f"| {name} | {bound:.0%} | {epochs[0]['first_s']:.2f} s | {seconds} s | {waits} s | {share:.2f} | "
            f"{taken:.0%} | {sum(int(epoch['wrong']) for epoch in epochs)} |"
        )

    def killed(self, name: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            before, process = self.fetched(), self.start(name, folder, 1.1, 1)
            deadline = time.monotonic() + self.chosen.timeout
            while self.fetched() - before < self.nbytes[name] / 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            kill(process)
            process.communicate()
            before = self.fetched()
            epochs, why = self.ended(self.start(name, folder, 1.1, 1))
            share = (self.fetched() - before) / self.nbytes[name]
        if not epochs:
            return f"| {name} | {why or 'ended early'} | | |"
        return f"| {name} | {epochs[0]['s']:.1f} s | {share:.2f} | {int(epochs[0]['wrong'])} |"


def kill(process: subprocess.Popen[str]) -> None:
    """It and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--loaders",
        nargs="+",
        choices=LOADERS,
        default=[name for name, (module, *_) in LOADERS.items() if find_spec(module)],
    )
    parser.add_argument("--bounds", nargs="*", type=float, default=[1, 2, 10, 50, 110], help="percent of the data")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shards", type=int, default=48)
    parser.add_argument("--shard-mb", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--mb-per-s", type=float, default=40.0)
    parser.add_argument("--timeout", type=float, default=90.0)
    for name, kind in (("train", str), ("folder", str), ("port", int), ("most", int), ("step-s", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        train(chosen)
        return
    with tempfile.TemporaryDirectory() as place:
        folder, nbytes = Path(place), {}
        for name in chosen.loaders:
            _, write, _, where = LOADERS[name]
            (folder / where).mkdir()
            write(folder / where, chosen.shards, int(chosen.shard_mb * 1e6) // RECORDS)
            nbytes[name] = sum(file.stat().st_size for file in (folder / where).rglob("*") if file.is_file())
        here, there = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, chosen.latency_ms / 1e3, chosen.mb_per_s * 1e6, there), daemon=True
        )
        server.start()
        asked = Asked(chosen, here.recv(), nbytes)
        print(
            f"{chosen.shards} shards of {chosen.shard_mb:g} MB, {chosen.latency_ms:g} ms, {chosen.mb_per_s:g} MB/s; "
            f"steps of {asked.step_s * 1e3:.1f} ms: an epoch takes "
            f"{asked.step_s * chosen.shards * RECORDS / BATCH:.1f} s\n\n| | bound | first batch | epochs | waited in "
            f"them | fetched | on disk at the end | wrong |\n|---|---|---|---|---|---|---|---|"
        )
        for _ in range(chosen.rounds):
            for bound in chosen.bounds:
                for name in chosen.loaders:
                    print(asked.at_bound(name, bound / 100), flush=True)
        print("\nKilled while it fetches, and begun again:\n\n| | epoch | fetched again | wrong |\n|---|---|---|---|")
        for name in chosen.loaders:
            print(asked.killed(name), flush=True)
        server.kill()
        server.join()


if __name__ == "__main__":
    main()
