"""The indices of files, and the command that writes them."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import fsspec
import numpy as np
import pytest

from penstock.__main__ import main
from penstock._files import index_file
from penstock._files.files import Stamp
from penstock._files.index_file import index_path_of, read_header, read_offsets, write_index
from penstock.formats import _jsonl, jsonl, tar
from penstock.formats._jsonl import FORMAT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_jsonl(path, n):
    with open(path, "w") as file:
        file.writelines(json.dumps({"k": k}) + "\n" for k in range(n))


def write_tar(path, n):
    with tarfile.open(path, "w") as archive:
        for k in range(n):
            member = tarfile.TarInfo(f"{k}.txt")
            archive.addfile(member, io.BytesIO())


def index_of(path, folder=None):
    place = index_path_of(path, folder)
    return read_offsets(place, read_header(place))


HEADER = {"penstock index": 1, "kind": "tar", "records": 1, "size": 5, "mtime_ns": 6, "version": "", "checksum": 1}


class TestTheFile:
    def test_is_frozen_and_comes_back(self):
        """A release that changes this makes every user index everything again."""
        write_index("new/folder/x.index", "jsonl", Stamp(5, 6), np.array([0, 2]))
        assert Path("new/folder/x.index").read_bytes() == (
            b'{"penstock index": 1, "kind": "jsonl", "records": 1, "size": 5, "mtime_ns": 6, '
            b'"version": "", "checksum": 2929609768}\n'
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
        )
        header = read_header("new/folder/x.index")
        assert (header.kind, header.records, header.stamp) == ("jsonl", 1, Stamp(5, 6))
        assert read_offsets("new/folder/x.index", header).tolist() == [0, 2]

    @pytest.mark.parametrize("length", [0, 1, 50, 105, 110, 125])
    def test_that_is_cut_short_is_refused(self, length):
        write_index("x.index", "tar", Stamp(5, 6), np.array([0, 2]))
        os.truncate("x.index", length)
        with pytest.raises(ValueError, match="x.index is damaged or not an index: .* Delete it, and index it again"):
            index_of("x")

    @pytest.mark.parametrize(
        "line",
        [
            *(b"garbage", b"[]", b"[" * 900, b"{}", b'{"penstock index": 1}', b"\xff\xfe", b"null"),
            *(
                json.dumps({**HEADER, **wrong}).encode()
                for wrong in ({"records": -1}, {"records": 1e9}, {"kind": 5}, {"checksum": 2})
            ),
        ],
    )
    def test_that_is_garbage_is_refused(self, line):
        with open("x.index", "wb") as file:
            file.write(line + b"\n" + bytes(16))
        with pytest.raises(ValueError, match="x.index is damaged or not an index"):
            index_of("x")

    def test_of_a_later_format_is_refused(self):
        with open("x.index", "wb") as file:
            file.write(b'{"penstock index": 2}\n')
        with pytest.raises(
            ValueError, match="x.index is an index of format 2, but this version of penstock reads format 1"
        ):
            index_of("x")

    def test_is_written_completely_or_not_at_all(self, monkeypatch):
        """Seen red with a write into the place itself."""

        def broken(*arguments):
            raise KeyboardInterrupt

        write_index("x.index", "tar", Stamp(5, 6), np.array([0, 2]))
        monkeypatch.setattr(index_file.os, "replace", broken)
        with pytest.raises(KeyboardInterrupt):
            write_index("x.index", "tar", Stamp(7, 8), np.array([0, 3]))
        assert os.listdir() == ["x.index"]
        assert index_of("x").tolist() == [0, 2]


def run(capsys, *arguments):
    code = main(["index", *arguments])
    printed = capsys.readouterr()
    # A slow machine shows how far it is.
    return (
        code,
        printed.out,
        "".join(line for line in printed.err.splitlines(keepends=True) if not line.startswith("indexing: ")),
    )


def said(new, records, up_to_date=0, not_needed=0, failed=0):
    return (
        f"indexed: {new} ({records} records), up to date: {up_to_date}, no index needed: {not_needed}, failed: "
        f"{failed}\n"
    )


class TestTheCommand:
    def test_indexes_what_has_changed(self, capsys):
        write_jsonl("a.jsonl", 3)
        write_tar("b.tar", 5)
        assert run(capsys, "*.jsonl", "b.tar") == (0, said(2, 8), "")
        assert len(index_of("a.jsonl")) == 4
        assert len(index_of("b.tar")) == 6
        assert run(capsys, "*") == (0, said(0, 0, up_to_date=2), "")
        write_jsonl("a.jsonl", 4)
        assert run(capsys, "*") == (0, said(1, 4, up_to_date=1), "")
        os.truncate("b.tar.index", 120)
        assert run(capsys, "*") == (0, said(1, 5, up_to_date=1), "")
        assert sorted(os.listdir()) == ["a.jsonl", "a.jsonl.index", "b.tar", "b.tar.index"]

    def test_parquet_needs_none(self, capsys):
        for name in ("a.parquet", "b.arrow"):
            with open(name, "w"):
                pass
        assert run(capsys, "*") == (0, said(0, 0, not_needed=2), "")

    @pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
    def test_does_the_rest_if_one_fails(self, capsys, workers):
        write_jsonl("a.jsonl", 3)
        write_tar("c.tar", 5)
        with open("b.tar", "w"), open("notes.txt", "w"):
            pass
        code, out, err = run(capsys, "*", "gone.jsonl", "--workers", workers)
        assert (code, out) == (1, said(2, 8, failed=3))
        lines = sorted(err.splitlines())
        assert lines[0].startswith("penstock index: b.tar: b.tar cannot be read as a tar at byte 0: it is empty")
        assert "No such file or directory: 'gone.jsonl'" in lines[1]
        assert lines[2].startswith("penstock index: notes.txt: the name must end in one of .")
        assert sorted(os.listdir()) == ["a.jsonl", "a.jsonl.index", "b.tar", "c.tar", "c.tar.index", "notes.txt"]

    @pytest.mark.parametrize("suffix", ["gz", "zst", "xz", "bz2"])
    def test_goes_on_behind_what_is_no_compressed_file(self, capsys, suffix):
        """Seen to fail: zstandard and lzma raise errors of their own, which ended the command with a traceback; and so
        did zlib."""
        write_jsonl("b.jsonl", 3)
        with open(f"a.jsonl.{suffix}", "wb") as file:
            file.write(gzip.compress(b"{}")[:10] + b"\xff" * 20 if suffix == "gz" else b"{}")
        code, out, err = run(capsys, "*")
        assert (code, out) == (1, said(1, 3, failed=1))
        assert err.startswith(f"penstock index: a.jsonl.{suffix}: ")

    def test_indexes_what_is_elsewhere_into_a_folder(self, capsys):
        files = fsspec.filesystem("memory")
        files.pipe({f"/box/{k}.jsonl": b"1\n2\n" for k in range(2)})
        try:
            code, _, err = run(capsys, "memory://box/*.jsonl")
            assert code == 1
            assert err.count("an index cannot be written next to it. Pass --index FOLDER.") == 2
            assert run(capsys, "memory://box/*.jsonl", "--index", "indices")[:2] == (0, said(2, 4))
            assert run(capsys, "memory://box/*.jsonl", "--index", "indices")[1] == said(0, 0, up_to_date=2)
            dataset = jsonl("memory://box/{0,1}.jsonl", index="indices")
            assert [dataset[k] for k in range(4)] == [1, 2, 1, 2]
            dataset.close()
        finally:
            files.rm("/box", recursive=True)

    def test_two_remote_files_of_one_name_and_size_do_not_share_an_index(self, capsys):
        """Seen to fail: the second was "up to date", and six of its nine samples were read."""
        files = fsspec.filesystem("memory")
        try:
            for version, n in (("v1", 6), ("v2", 9)):
                write_tar("0.tar", n)
                files.put("0.tar", f"/{version}/0.tar")
            assert files.size("/v1/0.tar") == files.size("/v2/0.tar")
            assert run(capsys, "memory://v1/0.tar", "--index", "indices")[:2] == (0, said(1, 6))
            first = tar("memory://v1/0.tar", index="indices")
            assert run(capsys, "memory://v2/0.tar", "--index", "indices")[:2] == (0, said(1, 9))
            assert len(tar("memory://v2/0.tar", index="indices")) == 9
            with pytest.raises(
                ValueError,
                match=(
                    r"indices/0.tar.index has changed since it was first read: it was rewritten for .* or for another"
                ),
            ):
                first[0]
        finally:
            for version in ("v1", "v2"):
                files.rm(f"/{version}", recursive=True)

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (["*.tar"], "penstock index: no file matches '*.tar'"),
            (
                ["?/a.jsonl", "--index", "indices"],
                "x/a.jsonl and y/a.jsonl have the same name, so one folder cannot hold the indices of both",
            ),
        ],
    )
    def test_refuses_what_it_does_not_find_and_two_files_of_one_name(self, capsys, arguments, why):
        for folder in ("x", "y"):
            os.mkdir(folder)
            write_jsonl(f"{folder}/a.jsonl", 3)
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert why in err

    @pytest.mark.parametrize(("then", "now"), [(0, None), (None, 0), (-5 * 10**9, -5 * 10**9 + 1), (0, -1)])
    def test_any_time_is_a_time(self, capsys, then, now):
        """As of files that are built reproducibly. Seen to fail: 0 fitted any other time, and an index of a file from
        before 1970 was damaged."""
        write_jsonl("a.jsonl", 3)
        if then is not None:
            os.utime("a.jsonl", ns=(then, then))
        assert run(capsys, "a.jsonl")[:2] == (0, said(1, 3))
        assert len(list(jsonl("a.jsonl"))) == 3
        write_jsonl("a.jsonl", 3)
        if now is not None:
            os.utime("a.jsonl", ns=(now, now))
        with pytest.raises(ValueError, match=r"a\.jsonl has changed since it was indexed: it was written to"):
            jsonl("a.jsonl")[0]

    @pytest.mark.parametrize(
        ("told", "error"), [({"ETag": "ä" * 200}, ""), ({"size": None}, "does not report its size")]
    )
    def test_what_a_store_may_say(self, capsys, monkeypatch, told, error):
        """Seen to fail: both indices were written, and "damaged" whenever they were read."""
        files = fsspec.filesystem("memory")
        files.pipe({"/box/a.jsonl": b"1\n2\n"})
        try:
            info = files.info
            monkeypatch.setattr(type(files), "info", lambda self, path, **_: {**info(path), **told})
            code, _, err = run(capsys, "memory://box/a.jsonl", "--index", "indices")
            assert (code, error in err) == (bool(error), True)
            assert os.path.exists("indices") == (not error)
            if not error:
                assert jsonl("memory://box/a.jsonl", index="indices")[1] == 2
        finally:
            files.rm("/box", recursive=True)

    def test_a_file_that_changes_meanwhile_is_refused(self, capsys, monkeypatch):
        """Its index would be of neither version. Seen red without the second look at the stamp."""
        write_jsonl("a.jsonl", 3)
        offsets = FORMAT.offsets

        def and_then_it_grows(file, path):
            found = offsets(file, path)
            write_jsonl("a.jsonl", 4)
            return found

        monkeypatch.setattr(_jsonl, "FORMAT", FORMAT._replace(offsets=and_then_it_grows))
        code, _, err = run(capsys, "a.jsonl")
        assert code == 1
        assert "a.jsonl has changed since it was first checked: it had 27 bytes and now has 36" in err
        assert os.listdir() == ["a.jsonl"]

    @pytest.mark.parametrize("arguments", [["index"], ["unknown"], ["index", "x", "--workers", "0"]])
    def test_wrong_arguments_are_2(self, capsys, arguments):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: python -m penstock" in capsys.readouterr().err

    @pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.soak), "2"])
    def test_ctrl_c_ends_it_and_leaves_nothing_half(self, workers):
        """It reads from a store that never answers to the end: a pipe."""
        for name in ("a.jsonl", "b.jsonl"):
            os.mkfifo(name)
        Path("program.py").write_text(STORE)
        program = subprocess.Popen(
            [
                sys.executable,
                "program.py",
                "index",
                "slow://a.jsonl",
                "slow://b.jsonl",
                "--workers",
                workers,
                "--index",
                ".",
            ],
            start_new_session=True,
        )
        with ExitStack() as pipes:
            for name in ("a.jsonl", "b.jsonl")[: int(workers)]:
                pipes.enter_context(open(name, "w"))  # goes on once it is opened at the other end
            os.killpg(program.pid, signal.SIGINT)
            assert program.wait(100) == 130
        assert sorted(os.listdir()) == ["a.jsonl", "b.jsonl", "program.py"]


STORE = """
import sys

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.__main__ import main


class Slow(LocalFileSystem):
    protocol = "slow"

    def info(self, path, **words):
        return {"name": path, "size": 10, "type": "file"}

    def _open(self, path, mode="rb", **words):
        return open(path, mode, buffering=0)  # fsspec's own would fail, because it looks for the end of a pipe


fsspec.register_implementation("slow", Slow)
if __name__ == "__main__":
    sys.exit(main())
"""
