"""Write the first sentence of each public name into the pages of docs/api/, which a code host shows without their
docstrings.

    python tests/project/api_tables.py

test_pages.py checks that they are fresh. It reads the sources, so that no trainer needs to be installed.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- names: written by tests/project/api_tables.py -->", "<!-- end of the names -->"


def sentences() -> dict[str, str]:
    """The first sentence of every docstring below pipes/, by class, function, constant, or ``Class.method``."""
    found: dict[str, str] = {}

    def note(name: str, text: str | None) -> None:
        sentence = re.split(r"(?<=[.])\s", " ".join((text or "").partition("\n\n")[0].split()))[0]
        if sentence:
            found.setdefault(name, re.sub(r"`+", "`", sentence).replace("|", r"\|"))

    files = (ROOT / "pipes").rglob("*.py")
    # a name may be that of a private function, too
    for file in sorted(files, key=lambda file: (file.name != "testing.py", file)):
        body = ast.parse(file.read_text()).body
        for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                note(node.name, ast.get_docstring(node))
                methods = [
                    one
                    for one in getattr(node, "body", ())
                    if isinstance(one, ast.FunctionDef) and isinstance(node, ast.ClassDef)
                ]
                for method in methods:
                    note(
                        f"{'Loader' if node.name == 'FromDataset' else node.name}.{method.name}",
                        ast.get_docstring(method),
                    )
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                below = after.value if isinstance(after, ast.Expr) else None
                # a class, or a type
                made_of = found.get(ast.unparse(node.value).removesuffix("()"), f"`{ast.unparse(node.value)}`")
                text = str(below.value) if isinstance(below, ast.Constant) else made_of
                note(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), text)
    return found


def names(page: str) -> list[str]:
    """What the directives of a page document, in their order; a module is every name in it."""
    listed: list[str] = []
    for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)", page, re.MULTILINE):
        listed += [f"{name}.{one}" for one in importlib.import_module(name).__all__] if kind == "module" else [name]
    return listed


def page_with_table(page: str, said: dict[str, str]) -> str:
    rows = "\n".join(f"| `{name}` | {said[re.sub(r'^([a-z_]+[.])+(?=.)', '', name)]} |" for name in names(page))
    table = f"{BEGIN}\n\n| | |\n|---|---|\n{rows}\n\n{END}\n\n"
    page = re.sub(f"{BEGIN}.*?{END}\n\n", "", page, flags=re.DOTALL)
    return page.replace("\n\n", f"\n\n{table}", 1) if rows else page


if __name__ == "__main__":
    said = sentences()
    for path in (ROOT / "docs" / "api").glob("*.md"):
        path.write_text(page_with_table(path.read_text(), said))
