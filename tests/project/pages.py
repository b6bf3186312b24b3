"""Run the code of every page as a reader would: in an empty folder, with the wheel and what the page says to install,
and nothing else.

    python tests/project/pages.py [--wheel dist/torch_penstock-0.1.0-py3-none-any.whl] [--constraints constraints.txt]
    [page ...]

It makes a virtual environment with the wheel, and a second one on top of it for each page that installs more. No file
of this repository is within reach: the programs run in a temporary folder, without PYTHONPATH. CI runs the pages in one
environment that has everything (test_docs.py), which is faster, and checks that each page names what it imports.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import test_docs as docs

ROOT = docs.ROOT


def environment(folder: Path, wanted: list[str], constraints: Path, below: Path | None = None) -> Path:
    """The Python of a new environment with these packages, and with those of the environment ``below``."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    if below is not None:
        (others,) = below.glob("lib/python*/site-packages")
        (packages / "below.pth").write_text(f"{others}\n")
    python = folder / "bin" / "python"
    command = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "install",
        "--no-compile",
        "-c",
        constraints,
        *wanted,
    ]
    subprocess.run(command, check=True, cwd=folder, env=clean())
    return python


def clean() -> dict[str, str]:
    """The environment variables without those that show Python another place to import from."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def wanted(page: Path, wheel: Path) -> list[str]:
    """What a page says to install."""
    words = [word for line in re.findall(r"`pip install ([^`]+)`", page.read_text()) for word in shlex.split(line)]
    return [re.sub(r"^\.\[", f"{wheel}[", word) for word in words if word != "."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", default=docs.RUNNABLE)
    parser.add_argument(
        "--wheel", type=Path, default=next(iter(sorted((ROOT / "dist").glob("*.whl"))), None), help="make dist makes it"
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    wheel, failed = options.wheel.resolve(), []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        plain = environment(base, [str(wheel)], options.constraints.resolve())
        for number, page in enumerate(options.pages):
            more = wanted(page, wheel)
            python = (
                environment(Path(folder, f"more {number}"), more, options.constraints.resolve(), base)
                if more
                else plain
            )
            empty = Path(folder, f"page {number}")
            empty.mkdir()
            (empty / "page.py").write_text(docs.script(page.read_text()))
            ended = subprocess.run(
                [python, "page.py"],
                cwd=empty,
                env=clean(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            print(
                f"{page.resolve().relative_to(ROOT)}: {'runs' if not ended.returncode else 'fails'} {' '.join(more)}",
                flush=True,
            )
            if ended.returncode:
                print(ended.stdout + ended.stderr, flush=True)
                failed.append(page)
    sys.exit(f"{len(failed)} failed" if failed else None)


if __name__ == "__main__":
    main()
