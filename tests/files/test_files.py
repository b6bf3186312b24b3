"""Paths and files: patterns, compression, stamps."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import fsspec
import pytest
import zstandard
from braceexpand import braceexpand
from fsspec import asyn
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from penstock._command.index import format_of
from penstock._files import files as module
from penstock._files.files import Stamp, decompressed, opened, stamp, whole
from penstock._files.index_file import index_path_of
from penstock._files.paths import braces_expanded, compression, expanded, extra
from penstock._streams.known_files import FileRanges

BRACES = (
    "a/{00000..01242}.tar {0..3} {8..11} {08..11} {3..0} {0..10..5} {-2..2} {a,b}.x x{a,b{1,2}c,}y{0..1} {a..d}{x,y} "
    "{{a,b},c} none {a,} a{1..2}b{3..4}"
)
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.compress(data[:10]) + zstandard.compress(data[10:]),  # frames may follow each other
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("pattern", BRACES.split())
def test_braces_are_those_of_webdataset(pattern):
    assert list(braces_expanded(pattern)) == list(braceexpand(pattern))


@pytest.mark.parametrize("text", ["{a}", "{}", "}{", "a{b", "{1..}", "a}b"])
def test_other_braces_are_part_of_the_name(text):
    assert list(braces_expanded(text)) == [text]


class TestPatterns:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "deep" / "er").mkdir(parents=True)
        for name in ("b.tar", "a.tar", "c{1,2}.tar", "d[1].tar", "deep/x.tar", "deep/er/y.tar"):
            (tmp_path / name).write_text("")

    @pytest.mark.parametrize(
        ("paths", "found"),
        [
            ("a.tar", ["a.tar"]),
            (Path("a.tar"), ["a.tar"]),
            (["b.tar", "a.tar", "b.tar"], ["b.tar", "a.tar", "b.tar"]),
            ("?.tar", ["a.tar", "b.tar"]),
            (["{b,a}.tar", "deep/*.tar"], ["b.tar", "a.tar", "deep/x.tar"]),
            ("{deep,.}/[ax].tar", ["deep/x.tar", "./a.tar"]),
            ("**/[xy].tar", ["deep/er/y.tar", "deep/x.tar"]),
            ("c{1,2}.tar", ["c{1,2}.tar"]),
            ("d[1].tar", ["d[1].tar"]),
            ("new{0..1}.tar", ["new0.tar", "new1.tar"]),
            ([], []),
        ],
    )
    def test_stand_for_files(self, paths, found):
        assert expanded(paths) == found

    def test_what_fits_nothing_or_is_no_path_is_named(self):
        with pytest.raises(FileNotFoundError, match=r"no file matches 'e\*.tar', searched from"):
            expanded(["a.tar", "e*.tar"])
        with pytest.raises(TypeError, match="3 is not a path"):
            expanded(["a.tar", 3])


class TestRemote:
    @pytest.fixture(autouse=True)
    def memory(self):
        files = fsspec.filesystem("memory")
        files.pipe({"/box/1.txt": b"one", "/box/2.txt": b"two"})
        yield
        files.rm("/box", recursive=True)

    def test_files_are_found_and_read(self):
        assert (
            expanded("memory://box/*.txt")
            == expanded("memory://box/{1,2}.txt")
            == ["memory://box/1.txt", "memory://box/2.txt"]
        )
        with opened("memory://box/2.txt") as file:
            assert file.read() == b"two"
        assert stamp("memory://box/1.txt")[:2] == (3, 0)

    def test_ranges(self):
        ranges = FileRanges("memory://box/1.txt", Stamp(3, 17))
        assert (ranges.read(1, 3), ranges.read(0, 2)) == (b"ne", b"on")
        with pytest.raises(ValueError, match="ends before byte 9"):
            ranges.read(1, 9)
        ranges.close()
        with pytest.raises(ValueError, match="had 4 bytes and now has 3"):
            FileRanges("memory://box/1.txt", Stamp(4, 0))

    def test_what_a_pattern_finds_keeps_its_file_system(self, tmp_path, monkeypatch):
        """Seen to fail: file:///abs/1.txt became file://abs/1.txt, and what was found in a zip lost the zip."""
        for name in ("1.txt", "2.txt"):
            (tmp_path / name).write_text(name)
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
            archive.writestr("in/3.txt", "3.txt")
        monkeypatch.chdir(tmp_path)
        here = f"file://{tmp_path}"
        for pattern, found in {
            f"{here}/*.txt": [f"{here}/1.txt", f"{here}/2.txt"],
            "file://*.txt": [f"{here}/1.txt", f"{here}/2.txt"],
            f"zip://in/*.txt::{here}/z.zip": [f"zip://in/3.txt::{here}/z.zip"],
            "simplecache::memory://box/*.txt": ["simplecache::memory://box/1.txt", "simplecache::memory://box/2.txt"],
        }.items():
            assert expanded(pattern) == found
        with opened(f"zip://in/3.txt::{here}/z.zip") as file:
            assert file.read() == b"3.txt"

    def test_a_pattern_is_looked_for_anew(self, tmp_path):
        """Seen to fail: s3fs and others keep their listings, and a file that came later was not there."""
        fsspec.register_implementation("listed", Listed, clobber=True)
        for name in ("1", "2"):
            (tmp_path / name).write_text(name)
            assert len(expanded(f"listed://{tmp_path}/*")) == int(name)
        with pytest.raises(
            FileNotFoundError, match=r"no file matches 'listed://.*\*\.txt'\.$"
        ):  # the current folder has nothing to do with it
            expanded(f"listed://{tmp_path}/*.txt")

    def test_what_signs_a_url_is_no_part_of_its_name(self):
        """Seen to fail: ? was a pattern, and .gz?… no compression."""
        url = "https://127.0.0.1:1/a/1.jsonl.gz?X-Signature=%2F*[x]{1..2}"
        assert expanded([url, url.replace("1.jsonl", "{1,2}.jsonl")]) == [url, url, url.replace("1.jsonl", "2.jsonl")]
        assert compression(url) == compression(f"simplecache::{url}") == ".gz"
        assert compression(f"zip://1.xz::{url}") == ".xz"
        assert format_of(url).kind == "jsonl"
        assert index_path_of(url, "folder") == "folder/1.jsonl.gz.index"
        assert index_path_of(url, None) == url.replace(".gz", ".gz.index")

    def test_each_byte_is_fetched_once_and_no_line_asks_for_its_own(self, monkeypatch):
        """As over HTTP. Seen to fail: fsspec's `readline` reads a block for each line, and its default for HTTP drops
        what it will need."""
        monkeypatch.setattr(module, "BLOCK", 2**16)
        monkeypatch.setattr(module, "BUFFER", 2**12)
        fsspec.register_implementation("counted", Counted, clobber=True)
        Counted.fetched, Counted.reads = 0, 0
        with whole("counted://any") as file:
            assert tuple(file) == Counted.LINES
        assert Counted.fetched == sum(map(len, Counted.LINES))
        assert Counted.reads < 150

    def test_a_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "fsspec", None)
        with pytest.raises(ImportError, match=r"'memory://box/1.txt' needs the package fsspec: pip install 'fsspec'"):
            opened("memory://box/1.txt")
        with pytest.raises(ImportError, match="needs the package nosuch:"):
            extra("nosuch.module", "It")


class Listed(LocalFileSystem):
    """Keeps its listings."""

    protocol = "listed"
    kept = None

    def find(self, path, **words):
        self.kept = self.kept or super().find(path, **words)
        return self.kept

    def invalidate_cache(self, path=None):
        self.kept = None


class Counted(AbstractFileSystem):
    """A file of 5 * 10^5 bytes. Counts what it is asked for."""

    cachable = False
    cache_type = "bytes"
    LINES = tuple(b"%0999d\n" % k for k in range(500))

    def info(self, path, **words):
        return {"name": path, "size": sum(map(len, self.LINES)), "type": "file"}

    def _open(self, path, mode="rb", block_size=None, cache_type=None, **words):
        return CountedFile(self, path, mode, block_size, cache_type=cache_type or self.cache_type)


class CountedFile(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        Counted.fetched += end - start
        return b"".join(Counted.LINES)[start:end]

    def read(self, length=-1):
        Counted.reads += 1
        return super().read(length)


@pytest.mark.slow
def test_patterns_are_looked_for_on_a_server(tmp_path):
    """Seen to fail: http://http://… was asked for; and a signed URL was looked for as a pattern."""
    for name in ("1.jsonl", "2.jsonl", "3.txt"):
        (tmp_path / name).write_text(name)
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path), "0"]
    loop, thread = asyn.get_loop(), asyn.iothread[0]
    files = fsspec.filesystem("http")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            url = "http://127.0.0.1:" + re.search(r"port (\d+)", server.stdout.readline())[1]
            assert expanded(f"{url}/*.jsonl") == [f"{url}/1.jsonl", f"{url}/2.jsonl"]
            for path in expanded([f"{url}/*2.jsonl", f"{url}/2.jsonl?X-Signature=1"]):
                with opened(path) as file:
                    assert file.read() == b"2.jsonl"
        finally:
            server.terminate()
            files.close_session(loop, files._session)
            files.clear_instance_cache()
            # fsspec would keep it as long as the program lives, and later tests fork
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            asyn.reset_after_fork()


class TestCompressed:
    DATA = b"\n".join(b"line %d" % k for k in range(10_000))

    @pytest.mark.parametrize("suffix", PACK)
    def test_is_read_as_if_it_were_not(self, tmp_path, suffix):
        path = tmp_path / f"x.txt{suffix}"
        path.write_bytes(PACK[suffix](self.DATA))
        with decompressed(str(path)) as file:
            assert file.readline() == b"line 0\n"
            assert file.read() == self.DATA[7:]
        path.write_bytes(PACK[suffix](b""))
        with decompressed(str(path)) as file:
            assert file.read() == b""

    @pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
    def test_an_end_in_the_middle_is_an_error(self, tmp_path, suffix):
        """Seen red with zstandard's own stream, which gives what it has and says nothing; and a .gz or .zst of zero
        bytes had no records."""
        path = tmp_path / f"x.txt{suffix}"
        packed = PACK[suffix](self.DATA)
        for length in (len(packed) // 2, 0):
            path.write_bytes(packed[:length])
            with decompressed(str(path)) as file, pytest.raises(EOFError):
                file.read()

    @pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
    def test_each_of_several_parts_is_read_or_refused(self, tmp_path, suffix):
        """As pbzip2 and cat write them. Seen to fail: a .bz2 or .xz ended where the header of a part was damaged."""
        path = tmp_path / f"x.txt{suffix}"
        first, second = PACK[suffix](b"1\n"), bytearray(PACK[suffix](b"2\n"))
        path.write_bytes(first + second + bytes(4))
        with decompressed(str(path)) as file:
            assert file.read() == b"1\n2\n"
        second[1] ^= 255
        path.write_bytes(first + second)
        with (
            decompressed(str(path)) as file,
            pytest.raises(ValueError, match=rf"x\.txt{suffix} is damaged, or not compressed as its name says"),
        ):
            file.read()

    def test_a_longer_window_of_zstd_is_a_setting(self, tmp_path, monkeypatch):
        """As made by ``zstd --long=31``. Fails if an intact file is called damaged."""
        path = tmp_path / "x.txt.zst"
        parameters = zstandard.ZstdCompressionParameters(window_log=31, strategy=1, hash_log=10, chain_log=10)
        packing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        path.write_bytes(PACK[".zst"](b"first\n") + packing.compress(self.DATA) + packing.flush())
        with (
            decompressed(str(path)) as file,
            pytest.raises(
                ValueError,
                match=(
                    r"x\.txt\.zst was compressed with a window of more than 134,217,728 bytes .* "
                    r"PENSTOCK_ZSTD_LONG=31, "
                ),
            ),
        ):
            file.read()
        monkeypatch.setenv("PENSTOCK_ZSTD_LONG", "31")
        with decompressed(str(path)) as file:
            assert file.read() == b"first\n" + self.DATA
        monkeypatch.setenv("PENSTOCK_ZSTD_LONG", "2GB")
        with (
            decompressed(str(path)) as file,
            pytest.raises(ValueError, match="PENSTOCK_ZSTD_LONG='2GB', a str, must be a whole number"),
        ):
            file.read()

    def test_a_dictionary_of_zstd_is_named(self, tmp_path):
        """As made by ``zstd -D``. Fails if the library's own word for it is lost."""
        path = tmp_path / "x.txt.zst"
        words = zstandard.train_dictionary(2000, [b"line %d of %d" % (k, k * k) for k in range(2000)])
        path.write_bytes(zstandard.ZstdCompressor(dict_data=words).compress(self.DATA))
        with (
            decompressed(str(path)) as file,
            pytest.raises(
                ValueError, match=r"x\.txt\.zst is damaged, or not compressed as its name says: .*[Dd]ictionary"
            ),
        ):
            file.read()

    def test_what_grows_is_made_a_bit_at_a_time(self, tmp_path):
        """By RFC 8878 four bytes may stand for 128 KiB, here for zeros. Seen to fail: 128 KiB were decompressed at
        once, to all 256 MiB (and up to 4 GiB)."""
        path = tmp_path / "x.zst"
        path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + ((2**17 << 3 | 2).to_bytes(3, "little") + b"\0") * 2048)
        tracemalloc.start()
        try:
            with decompressed(str(path)) as file:
                assert file.read(3) == bytes(3)
            assert tracemalloc.get_traced_memory()[1] < 2**27 + 2**22  # 64 MiB, and its parts
        finally:
            tracemalloc.stop()


class TestChanged:
    def test_a_file_that_was_written_to_is_refused(self, tmp_path):
        path = tmp_path / "x"
        path.write_text("1234")
        then = stamp(str(path))
        FileRanges(str(path), then).close()
        os.utime(path, ns=(1, then.mtime_ns + 1))
        with pytest.raises(
            ValueError, match=r"x has changed since it was indexed: it was written to.*python -m penstock index .*x$"
        ):
            FileRanges(str(path), then)
        path.write_text("123")
        with pytest.raises(ValueError, match="had 4 bytes and now has 3"):
            FileRanges(str(path), then)

    def test_a_file_that_is_cut_while_it_is_read(self, tmp_path):
        path = tmp_path / "x"
        path.write_text("1234")
        ranges = FileRanges(str(path), stamp(str(path)))
        assert ranges.read(1, 4) == b"234"
        os.truncate(path, 2)
        with pytest.raises(ValueError, match="x has changed since it was indexed: it had 4 bytes and now has 2"):
            ranges.read(1, 4)
        ranges.close()
