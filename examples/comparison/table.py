"""Ask all loaders everything, and write the tables of docs/comparison.md and examples/measurements/comparison.md.

    python table.py                                      # the loaders that are installed here
    python table.py --pythons ../a/bin/python ../b/bin/python --docs ../../docs/comparison.md
    ../measurements/comparison.md

Not all loaders go into one environment (MosaicML Streaming wants an older NumPy): each is asked with the first of the
Pythons that has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from peers import PEERS, Row, rows

PROGRAMS = {  # the column's title
    "resume_in_mid_epoch": "resume in the middle of an epoch",
    "another_number_of_ranks": "continue with 3 ranks after 2",
    "time_to_resume": "time to resume, by position",
    "killed_worker": "a worker is killed",
    "epoch_boundary": "at the end of an epoch",
    "uneven_shards": "filtered shards on 4 ranks",
    "shuffle_buffer": "resume a shuffle buffer",
    "state_size": "size of the state",
    "other_machines": "workers on other machines",
    "changes_while_it_runs": "changes while it runs",
    "settled_out_of_order": "settled out of order",
}
AT_ONCE = 5  # columns of a table
BEGIN, END = "<!-- {}: written by examples/comparison/table.py -->", "<!-- end of {} -->"


def asked_here(programs: list[str], loaders: list[str]) -> None:
    """A line of JSON for each answer."""
    for program in programs:
        module = importlib.import_module(program)
        for row in rows(module.CLAIMS, module.question, loaders):
            print(json.dumps([program, dataclasses.asdict(row)]), flush=True)


def asked(pythons: list[str], programs: list[str], loaders: list[str]) -> dict[tuple[str, str], Row]:
    """The answers, by program and loader; printed as they come."""
    found: dict[tuple[str, str], Row] = {}
    for python in pythons:
        missing = [name for name in loaders if not any(who == name and row.version for (_, who), row in found.items())]
        command = [python, __file__, "--here", "--programs", *programs, "--loaders", *missing]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                program, values = json.loads(line)
                row = found[program, values["loader"]] = Row(**values)
                if row.version:
                    print(f"{program}: {row}", flush=True)
        if process.returncode:
            raise SystemExit(f"{command} ended with {process.returncode}")
    for name in dict.fromkeys(name for (_, name), row in found.items() if not row.version):
        print(f"{name}: skipped, because {PEERS[name].package} is not installed")
    return {key: row for key, row in found.items() if row.version}


def overview(found: dict[tuple[str, str], Row]) -> str:
    """A row for each loader, in Markdown: two tables, because one would be wider than a page."""
    names = {name: row.version for (_, name), row in found.items()}
    programs = [program for program in PROGRAMS if any(one == program for one, _ in found)]
    lines = [f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} cores."]
    for some in (programs[:AT_ONCE], programs[AT_ONCE:]):
        lines += ["", "| | " + " | ".join(PROGRAMS[program] for program in some) + " |", "|---" * (1 + len(some)) + "|"]
        for name in [name for name in PEERS if name in names]:
            cells = [found[program, name].found if (program, name) in found else "-" for program in some]
            lines.append(
                f"| {f'**{name}**' if name == 'penstock' else name} {names[name]} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def details(found: dict[tuple[str, str], Row]) -> str:
    """A row for each answer, in Markdown."""
    lines = ["| program | loader | answer | |", "|---|---|---|---|"]
    for program in PROGRAMS:
        for name in [name for name in PEERS if (program, name) in found]:
            row = found[program, name]
            lines.append(
                f"| `{program}` | {name} | {row.found} | {row.why.replace('<', '&lt;').replace('_', chr(92) + '_')} |"
            )
    return "\n".join(lines)


def write(docs: list[Path], found: dict[tuple[str, str], Row]) -> None:
    """Put each table between its marks, in the page that has them."""
    for name, table in (("overview", overview(found)), ("details", details(found))):
        page = next((page for page in docs if BEGIN.format(name) in page.read_text()), None)
        before, begin, rest = page.read_text().partition(BEGIN.format(name)) if page else ("", "", "")
        _, end, after = rest.partition(END.format(name))
        if page is None or not end:
            raise SystemExit(f"no page in {docs} has the lines {BEGIN.format(name)!r} and {END.format(name)!r}")
        page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--loaders", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--docs", type=Path, nargs="+", help="the pages whose tables are written anew")
    parser.add_argument("--here", action="store_true", help="in this process, for the program itself")
    options = parser.parse_args()
    if options.here:
        asked_here(options.programs, options.loaders)
        return
    found = asked(options.pythons, options.programs, options.loaders)
    if options.docs:
        write(options.docs, found)


if __name__ == "__main__":
    main()
