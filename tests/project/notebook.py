"""Run a notebook from its beginning, and keep what it shows:
``python tests/project/notebook.py examples/tour.ipynb [INTO]``.

Written are the cells, their outputs and nothing else: no times, no versions, and no path of the machine. Needs
``pip install --group docs``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def run(notebook: str) -> dict[str, Any]:
    """A notebook, as JSON, with the outputs of a new kernel, which works in the current folder."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(notebook, as_version=4)
    node.metadata = METADATA
    client = NotebookClient(node, timeout=400, kernel_name="python3", record_timing=False, coalesce_streams=True)
    client.create_kernel_manager().transport = "ipc"  # no port of the machine is opened
    client.execute()
    nbformat.validate(node)
    return {**json.loads(nbformat.writes(node)), "metadata": METADATA}


METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(file: str, into: str | None = None) -> None:
    came = run(Path(file).read_text())
    Path(into or file).write_text(json.dumps(came, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
