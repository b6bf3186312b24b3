"""Faults that mutmut makes up, in the files that have changed: ``make mutants``, or
``python tests/project/mutants.py [FILE ...] [--tests ...]``.

What has changed is what `check` says. ``pipes/penstock/_room/x.py`` is tested by the fast tests in
``tests/room/test_x.py``, or of the whole room where that is not there: a mutant that survives costs the time of all of
them. mutmut works in a copy of the checkout, ``build/mutants``, where it writes all mutants of a function beside it,
and runs those tests that call the function, in a fork for each mutant. It lists the mutants that no test killed. Many
of them are harmless, such as another word in a message; for the others, write a test, and plant the fault in
``faults.txt`` if it breaks a law.

"no tests" is also what it says of a function that only worker processes call, because it does not see calls there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from check import PACKAGE, ROOT, _git, changed, selected

COPY = ROOT / "build" / "mutants"
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
also_copy = {also}
pytest_add_cli_args = ["-m", "not slow", "-p", "no:cacheprovider", "--timeout=60"]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver" # torch has threads: the process that forks must not have run a test
timeout_multiplier = 3.0
timeout_constant = 20.0
use_git_change_detection = false
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Mutate what has changed, and list the mutants that no test kills.")
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="files of the package, instead of those that have changed"
    )
    parser.add_argument("--tests", nargs="+", default=[], help="other tests than those that belong to the files")
    chosen = parser.parse_args(arguments)
    files = [
        file
        for file in chosen.files or changed()
        if file.startswith(PACKAGE) and file.endswith(".py") and (ROOT / file).exists()
    ]
    if not files:
        print(
            "Nothing has changed in the package. Name files to mutate them anyway: make mutants "
            "FILES='pipes/penstock/_nodes/cycler.py ...'"
        )
        return 0
    tests = chosen.tests or sorted({test for file in files for test in _tests_of(file)}) or ["tests/laws"]
    _copy(files, tests)
    print(f"{len(files)} files, tested by {' '.join(tests)}", flush=True)
    mutated = COPY / "mutants" / "src"  # programs that tests start must find it too, and not an installed penstock
    mutated.mkdir(parents=True)  # Python looks only once whether a folder of its path is there
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(mutated), os.environ.get("PYTHONPATH")]))
    }
    mutmut = [sys.executable, "-m", "mutmut"]
    code = subprocess.run(
        [*mutmut, "run", "--max-children", str(os.cpu_count())], cwd=COPY, env=environment, check=False
    ).returncode
    if code == 0:
        print("\nNot killed:", flush=True)
        subprocess.run([*mutmut, "results"], cwd=COPY, env=environment, check=True)
        print(f"To see one: cd {COPY.relative_to(ROOT)} && {sys.executable} -m mutmut show NAME")
    return code


def _tests_of(file: str) -> list[str]:
    found = selected([file])[0]
    own = [f"{room}/test_{Path(file).stem}.py" for room in found]
    return [one for one in own if (ROOT / one).exists()] or found


def _copy(files: list[str], tests: list[str]) -> None:
    """Make the copy, with mutmut's settings in its pyproject.toml."""
    shutil.rmtree(COPY, ignore_errors=True)
    there = [file for file in _git("ls-files", "--cached", "--others", "--exclude-standard") if (ROOT / file).is_file()]
    for file in there:
        (COPY / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, COPY / file)
    # mutmut takes the name of a module from its path below ``src``, and from nowhere else
    (COPY / "src").symlink_to("pipes")
    settings = SETTINGS.format(
        files=json.dumps([file.replace("pipes/", "src/", 1) for file in files]),
        also=json.dumps(sorted({Path(file).parts[0] for file in there} - {"pipes", "tests"})),
        tests=json.dumps(tests),
    )
    with (COPY / "pyproject.toml").open("a") as config:
        config.write(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
