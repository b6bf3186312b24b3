"""The fast tests of what has changed, and the linters: ``make check``, or ``python tests/project/check.py [FILE ...]``.

What has changed is what is not in the upstream branch yet: uncommitted, untracked, or committed since (files can be
named instead). A file of a room, ``pipes/penstock/_room/x.py``, is tested by all of ``tests/room/``; any other file of
the package by the test files that name its module. A changed test file is tested by itself, and another file of the
tests by those that import it. Whatever has changed in the package, the laws, the import rule and the mutations come
along.

The tests run against ``pipes/``, and not against the installed wheel, which is what ``make test`` is for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "pipes/penstock/"
ALWAYS = ["tests/laws", "tests/project/test_architecture.py", "tests/project/test_mutations.py"]
QUIETLY = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]


def changed() -> list[str]:
    """Files that differ from where this branch left its upstream, or from HEAD where it has none; deleted ones too."""
    base = _git("merge-base", "HEAD", "@{upstream}") or ["HEAD"]
    return sorted({*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")})


def selected(files: list[str], root: Path = ROOT) -> tuple[list[str], list[str]]:
    """The tests of these files, and those that come along. What has been deleted, or stands in a folder that is there
    as a whole, is left out."""
    besides = ALWAYS if any(file.startswith(PACKAGE) for file in files) else []
    own = {test for file in files for test in _tests_of(file, root) if (root / test).exists()}
    whole = {*besides, *(test for test in own if (root / test).is_dir())}
    return sorted(test for test in own if test not in besides and str(Path(test).parent) not in whole), besides


def _tests_of(file: str, root: Path) -> set[str]:
    path = Path(file)
    if file.startswith(PACKAGE) and path.parts[2].startswith("_") and len(path.parts) > 3:
        return {f"tests/{path.parts[2].removeprefix('_')}"}
    if file.startswith(PACKAGE):
        module = ".".join(path.relative_to("pipes").with_suffix("").parts)
        return _naming(module.removesuffix(".__init__"), root) if module != "penstock.__init__" else set()
    if file.startswith("tests/") and path.name.startswith("test_"):
        return {file}
    if file.startswith("tests/") and path.suffix == ".py":
        return _naming(path.stem, root)
    if path.suffix == ".md" or file.startswith("examples/"):
        return {"tests/project/test_docs.py", "tests/project/test_examples.py"}
    return {"tests/project"}  # the build, the linters, the workflows


def _naming(word: str, root: Path) -> set[str]:
    """The test files in which ``word`` stands."""
    tests = (root / "tests").rglob("test_*.py")
    return {str(test.relative_to(root)) for test in tests if word in test.read_text()}


def _git(*arguments: str) -> list[str]:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.splitlines() if ended.returncode == 0 else []


def main(files: list[str]) -> int:
    files = files or changed()
    if not files:
        print("Nothing has changed. Name files to check them anyway: python tests/project/check.py FILE ...")
        return 0
    own, besides = selected(files)
    print(f"{len(files)} files have changed: {' '.join([*own, *besides]) or 'no tests'}", flush=True)
    commands = [[sys.executable, "-m", "pytest", *QUIETLY, *tests] for tests in (own, besides) if tests]
    commands += [[sys.executable, "-m", *tool.split()] for tool in ("ruff check", "ruff format --check", "mypy")]
    return _side_by_side(commands)


def _side_by_side(commands: list[list[str]]) -> int:
    """Run all of them at once; say how each ended, as it ends, and what those said that failed. 1 if any has failed."""
    path = os.pathsep.join(filter(None, [str(ROOT / "pipes"), os.environ.get("PYTHONPATH")]))
    began, failed = time.monotonic(), False

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )

    with ThreadPoolExecutor(len(commands)) as pool:
        for future in as_completed([pool.submit(run, command) for command in commands]):
            ended = future.result()
            # 5: all of these tests are slow
            ok = ended.returncode == 0 or (ended.returncode == 5 and "pytest" in ended.args)
            failed |= not ok
            name = " ".join(word for word in ended.args[2:] if word not in QUIETLY)
            said = (ended.stdout.splitlines() or [""])[-1] if ok else f"exit status {ended.returncode}\n{ended.stdout}"
            print(f"{'ok' if ok else 'FAILED':6} {time.monotonic() - began:5.1f} s  {name}: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
