"""Tar files: the samples that webdataset makes of them, byte for byte."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import zstandard
from format_laws import open_files
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset
from webdataset.tariterators import group_by_keys, tar_file_iterator

from penstock import Loader, Resident, filtered
from penstock.__main__ import main
from penstock.formats import tar
from penstock.formats._tar import sample_offsets

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
NAMES = [
    "a/001.jpg", "a/001.CLS", "a/001.seg.png", "a.b/002.txt", "a.b/002.json", "003", "__meta__", "__skip__/x.txt",
    "x/__not__.txt", "dir/.hidden", "d.d/.hidden", ".dot", ".x.y", "004.txt", "004.", "005.a", "006.a", "005.a",
    "ü/ö.txt", "n" * 120 + ".txt", "deep/" * 40 + "007.txt", "008.x", "008.y",
]  # fmt: skip


def write(path, names=NAMES, form=tarfile.PAX_FORMAT, seed=0):
    rng = np.random.default_rng(seed)
    with tarfile.open(path, "w", format=form) as archive:
        for name in names:
            data = rng.bytes(int(rng.choice([0, 1, 511, 512, 513, 5000])))
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return str(path)


def index(*paths):
    assert main(["index", *map(str, paths)]) == 0


def theirs(*paths):
    """Its own reader leaves files open, so it is given open ones. The samples come without what tells where they are
    from."""
    samples = []
    for path in paths:
        with open(path, "rb") as file:
            members = ({**member, "__url__": ""} for member in tar_file_iterator(file))
            samples += [
                {key: value for key, value in sample.items() if key != "__url__"} for sample in group_by_keys(members)
            ]
    return samples


def ours(dataset):
    samples = [dataset[k] for k in range(len(dataset))]
    dataset.close()
    return samples


FORMS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def below_zero(header):
    """The same, with a size of -512 bytes."""
    header = header[:124] + b"-0000001000\0" + header[136:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def long_name(size):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = b"L", size
    return header.tobuf(tarfile.GNU_FORMAT)


class TestAsWebdataset:
    @pytest.mark.parametrize(
        ("form", "suffix"), [*product(FORMS, ["", ".gz"]), ("pax", ".zst"), ("pax", ".xz"), ("pax", ".bz2")]
    )
    def test_reads(self, tmp_path, form, suffix):
        plain = write(tmp_path / "x.tar", form=FORMS[form])
        path = tmp_path / f"y.tar{suffix}"
        path.write_bytes(PACK[suffix](Path(plain).read_bytes()))
        expected = theirs(path if suffix == ".gz" else plain)
        assert len(expected) > 10
        index(path)
        assert ours(tar(path)) == expected
        assert ours(tar(path, counts=[len(expected)])) == expected

    @settings(max_examples=60, deadline=None)
    @given(
        names=st.lists(
            st.text(st.sampled_from("ab./_ü"), min_size=1, max_size=8).filter(lambda name: name.strip("/.")),
            max_size=12,
        ),
        form=st.sampled_from(sorted(FORMS)),
    )
    def test_names_any_file(self, tmp_path_factory, names, form):
        """Both refuse a sample with two files of one name. We also refuse one that comes again with other files, which
        would be two halves, and leave out what macOS adds."""
        names = [name for name in names if not name.rpartition("/")[2].startswith("._")]
        path = tmp_path_factory.mktemp("x") / "x.tar"
        write(path, names, FORMS[form])
        try:
            expected = theirs(path)
        except ValueError:
            with open(path, "rb") as file, pytest.raises(ValueError, match="has two files|are not next to each other"):
                sample_offsets(file, "x.tar")
            return
        fields: dict[str, set[str]] = {}
        if any(not sample.keys() <= fields.setdefault(sample["__key__"], {*sample}) for sample in expected):
            with open(path, "rb") as file, pytest.raises(ValueError, match="are not next to each other"):
                sample_offsets(file, "x.tar")
            return
        index(path)
        assert ours(tar(path)) == expected

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_files_of_a_sample_that_are_not_neighbours_are_refused(self, tmp_path, suffix, capsys):
        """All pictures, then all labels, as two runs of tar append them. Seen to fail: each sample became two halves,
        without a word."""
        path = tmp_path / f"x.tar{suffix}"
        write(tmp_path / "x.tar", [f"{k}.{end}" for end in ("jpg", "json") for k in range(4)], tarfile.USTAR_FORMAT)
        if suffix:
            path.write_bytes(PACK[suffix]((tmp_path / "x.tar").read_bytes()))
        assert main(["index", str(path)]) == 1
        assert (
            f"the files of the sample '0' are not next to each other in {path}: .jpg came before, and .json only"
            in capsys.readouterr().err
        )
        stream = Loader.from_dataset(
            tar(path, epoch_size=8, lanes=1, bookmarks=tmp_path / "b"), batch_size=1, collate_fn=list
        )
        with stream, pytest.raises(ValueError, match="are not next to each other"):
            iterator = iter(stream)
            for _ in range(4):
                next(iterator)
            state = stream.state_dict()
            next(iterator)
        again = Loader.from_dataset(
            tar(path, epoch_size=8, lanes=1, bookmarks=tmp_path / "b"), batch_size=1, collate_fn=list
        )
        again.load_state_dict(state)
        with again, pytest.raises(ValueError, match="are not next to each other"):
            next(iter(again))

    def test_a_sample_that_comes_twice_is_two_samples(self, tmp_path, caplog):
        """As in tars that were appended or joined. It is said once."""
        path = tmp_path / "x.tar"
        write(path, [*["1.a", "1.b", "2.a", "2.b"] * 2, "1.b"], tarfile.USTAR_FORMAT)
        index(path)
        assert ours(tar(path)) == theirs(path)
        assert [message for message in caplog.messages if "more than one sample" in message] == [
            f"{path} has more than one sample '1'. All of them are read."
        ]

    def test_a_compressed_tar_under_another_name(self, tmp_path):
        """Seen to fail: a sound file was called damaged."""
        write(tmp_path / "x.tar", ["1.a"], tarfile.USTAR_FORMAT)
        (tmp_path / "y.tar").write_bytes(PACK[".gz"]((tmp_path / "x.tar").read_bytes()))
        with (
            open(tmp_path / "y.tar", "rb") as file,
            pytest.raises(ValueError, match=r"is not a tar \(it is compressed by gzip, so its name must end in \.gz\)"),
        ):
            sample_offsets(file, "y.tar")

    def test_leaves_out_what_is_no_file(self, tmp_path):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w") as archive:
            for name, kind in (
                ("1.a", b"0"),
                ("d.d", b"5"),
                ("1.b", b"3"),
                ("__link__", b"1"),
                ("latest", b"2"),
                ("2.a", b"7"),
                ("f.f", b"6"),
                ("3.a", b"0"),
            ):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "1.a" if kind in b"12" else ""
                if kind in b"07":
                    member.size = 3
                archive.addfile(member, io.BytesIO(b"abc"))
        index(path)
        expected = [{"__key__": str(k), "a": b"abc"} for k in (1, 2, 3)]
        assert ours(tar(path)) == theirs(path) == expected

    @pytest.mark.parametrize("form", ["gnu", "pax"])
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    @pytest.mark.parametrize(("name", "to", "kind"), [
        ("1.jpg", "0.jpg", tarfile.LNKTYPE), ("1.jpg", "9.jpg", tarfile.SYMTYPE), ("1.jpg", "missing", tarfile.LNKTYPE),
        ("1.jpg", "n" * 200, tarfile.SYMTYPE), ("n" * 200 + ".jpg", "0.jpg", tarfile.LNKTYPE),
    ])  # fmt: skip
    def test_a_link_in_a_sample_is_refused(self, tmp_path, form, suffix, name, to, kind, capsys):
        """Wherever it leads. Seen red: its sample came without it, in silence, as from webdataset."""
        plain, path = tmp_path / "x.tar", tmp_path / f"y.tar{suffix}"
        with tarfile.open(plain, "w", format=FORMS[form]) as archive:
            for member in map(tarfile.TarInfo, ("0.jpg", name, f"{name[:-4]}.txt", "9.jpg")):
                member.type, member.linkname = (kind, to) if member.name == name else (tarfile.REGTYPE, "")
                archive.addfile(member)
        path.write_bytes(PACK[suffix](plain.read_bytes()))
        said = f"'{name}' is a link, and links are not followed, so its sample would lack it. Create the tar with"
        assert main(["index", str(path)]) == 1
        assert said in capsys.readouterr().err
        data = tar(path, counts=[3])
        with pytest.raises(ValueError, match=said):
            data[2]
        data.close()

    def test_links_are_stored_as_files_when_that_is_done(self, tmp_path):
        folder = tmp_path / "d"
        folder.mkdir()
        (folder / "0.jpg").write_bytes(b"image")
        (folder / "1.jpg").hardlink_to(folder / "0.jpg")
        (folder / "2.jpg").symlink_to("0.jpg")
        remedy = ["--dereference", "--hard-dereference"]
        subprocess.run(["tar", *remedy, "--sort=name", "-cf", tmp_path / "0.tar", "-C", tmp_path, "d"], check=True)
        with tarfile.open(tmp_path / "1.tar", "w", dereference=True) as archive:
            archive.add(folder, "d")
        index(*tmp_path.glob("?.tar"))
        for path in tmp_path.glob("?.tar"):
            assert ours(tar(path)) == [{"__key__": f"d/{k}", "jpg": b"image"} for k in range(3)]

    @pytest.mark.parametrize("folder", ["", "d/", "a/b.c/"])
    def test_leaves_out_what_macos_adds(self, tmp_path, folder):
        """Before each file, its attributes in another. Seen red: these made samples of their own, which had the key
        of the folder, so the tar was refused."""
        names = [f"{folder}{added}{k}.{end}" for k in (0, 1) for end in ("jpg", "txt") for added in ("._", "")]
        path = write(tmp_path / "x.tar", [f"{folder}._.ds_store", *names, f"{folder}.hidden"])
        index(path)
        assert [sorted(sample) for sample in ours(tar(path)) if not sample["__key__"].endswith("/")] == [
            ["__key__", "jpg", "txt"]
        ] * 2

    @pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
    def test_reads_what_tar_writes(self, tmp_path, form):
        folder = tmp_path / "data"
        folder.mkdir()
        for k in range(20):
            (folder / f"{k:03d}.txt").write_text(str(k) * k)
            (folder / f"{k:03d}.{'long' * 10 if form in ('v7', 'ustar') else 'long' * 40}").write_text("x")
        path = tmp_path / "x.tar"
        subprocess.run(["tar", f"--format={form}", "--sort=name", "-cf", path, "-C", tmp_path, "data"], check=True)
        index(path)
        samples = ours(tar(path))
        assert len(samples) == 20
        assert samples == theirs(path)


def test_a_large_file_is_measured_in_binary(tmp_path):
    """Above 8 GiB, GNU and Python write the size in base 256. The file has a hole for its data."""
    path = tmp_path / "x.tar"
    member = tarfile.TarInfo("1.bin")
    member.size = 2**34 + 1
    with open(path, "wb") as file:
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.seek(member.size + 511, os.SEEK_CUR)
        last = tarfile.TarInfo("2.txt")
        file.write(last.tobuf() + bytes(1024))
    with open(path, "rb") as file:
        assert sample_offsets(file, "x.tar").tolist() == [0, 2**34 + 1024, 2**34 + 1536]


class TestDamaged:
    """Each error names the file and the place. Seen red for a file that is cut between two members without the check of
    its end."""

    @pytest.mark.parametrize("length", [0, 100, 512, 700, 1024, 1536, 2048, 2500, "between"])
    def test_a_tar_that_is_cut_short(self, tmp_path, length):
        path = write(tmp_path / "x.tar", ["1.a", "1.b", "2.a", "3.a", "3.b"], tarfile.GNU_FORMAT, seed=4)
        index(path)
        samples = len(tar(path))
        if length == "between":
            with open(path, "rb") as file:
                length = int(sample_offsets(file, path)[1])
        os.truncate(path, length)
        assert main(["index", path]) == 1
        if length:
            with pytest.raises(ValueError, match=f"{path} cannot be read as a tar at byte .*cut short"):
                ours(tar(path, counts=[samples]))
        else:
            with pytest.raises(ValueError, match=f"{path} cannot be read as a tar at byte 0: it is empty"):
                ours(tar(path, counts=[samples]))
        with pytest.raises(ValueError, match=f"{path} has changed since it was indexed"):
            ours(tar(path))

    def test_an_empty_tar_has_no_samples(self, tmp_path):
        paths = [write(tmp_path / "0.tar", []), write(tmp_path / "1.tar", ["1.a"])]
        index(*paths)
        dataset = tar(paths)
        assert dataset.counts.tolist() == [0, 1]
        assert ours(dataset) == theirs(*paths)

    @pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
    @pytest.mark.parametrize("damage", ["flip", "cut"])
    def test_compressed_data_is_checked_to_its_end(self, tmp_path, suffix, damage):
        """Seen to fail: nobody read behind the mark that ends the tar, where compressed data has its checksum and its
        end."""
        path = tmp_path / f"x.tar{suffix}"
        content = Path(write(tmp_path / "x.tar", [f"{k}.a" for k in range(20)])).read_bytes() + bytes(2**19)
        packed = bytearray(
            zstandard.ZstdCompressor(write_checksum=True).compress(content)
            if suffix == ".zst"
            else PACK[suffix](content)
        )
        if damage == "flip":
            packed[len(packed) // 3] ^= 1
        path.write_bytes(packed if damage == "flip" else packed[:-1])
        assert main(["index", str(path)]) == 1
        with pytest.raises((ValueError, EOFError), match=path.name):
            list(Loader.from_dataset(tar(path, epoch_size=20, bookmarks=False), 20, collate_fn=list))

    @pytest.mark.parametrize(
        ("damage", "why"),
        [
            (lambda content, second: b"no tar" * 1000, "byte 0: there is no valid tar header there."),
            (
                lambda content, second: content[: second + 3] + b"!" + content[second + 4 :],
                "byte SECOND: there is no valid tar header there.",
            ),
            (
                lambda content, second: below_zero(tarfile.TarInfo("1").tobuf()) + content,
                "byte 0: there is no valid tar header there.",
            ),
            (lambda content, second: content * 2, "the end-of-archive marker is there, but more"),
            (
                lambda content, second: content[:second] + bytes(512) + content[second + 512 :],
                "the end-of-archive marker is there, but more",
            ),
            (lambda content, second: long_name(2**31) + content, "a size of 2147483648 bytes"),
        ],
        ids=["no tar", "a damaged header", "a size below zero", "joined", "zeroed", "a long name"],
    )
    def test_what_would_lose_samples_or_take_all_memory(self, tmp_path, damage, why, capsys):
        """Seen to fail: what follows an end mark was left out; a name of 2 GiB was read; a size below zero led back to
        the same header, again and again."""
        path = write(tmp_path / "x.tar", ["1.a", "2.a", "3.a"], tarfile.GNU_FORMAT)
        with open(path, "rb") as file:
            second = int(sample_offsets(file, path)[1])
        Path(path).write_bytes(damage(Path(path).read_bytes(), second))
        why = why.replace("SECOND", str(second))
        assert main(["index", path]) == 1
        assert f"{path} cannot be read as a tar at byte" in (said := capsys.readouterr().err)
        assert why in said
        with pytest.raises(ValueError, match=why):
            ours(tar(path, counts=[3]))

    def test_a_sparse_file_is_refused(self, tmp_path):
        with open(tmp_path / "1.bin", "wb") as file:
            file.truncate(2**20)
            file.seek(2**19)
            file.write(b"x")
        for form in ("gnu", "posix"):
            subprocess.run(
                ["tar", f"--format={form}", "--sparse", "-cf", tmp_path / "x.tar", "-C", tmp_path, "1.bin"], check=True
            )
            with open(tmp_path / "x.tar", "rb") as file, pytest.raises(ValueError, match="it contains a sparse file"):
                sample_offsets(file, "x.tar")


@pytest.mark.parametrize(
    "read_all",
    [
        lambda dataset: filtered(Subset(dataset, range(3)), lambda sample: "x" in sample),
        lambda dataset: Resident(dataset, transform=len),
    ],
    ids=["keep", "Resident"],
)
def test_what_reads_all_of_it_once_leaves_no_file_open(read_all, tmp_path):
    """Seen to fail: every shard stayed open for as long as the result was held."""
    paths = [write(tmp_path / f"{number}.tar", ["a.x", "b.x"]) for number in range(2)]
    index(*paths)
    result = read_all(tar(paths))
    assert open_files(tmp_path) == []
    assert len(result[0]) if isinstance(result, Subset) else len(result) == 4
