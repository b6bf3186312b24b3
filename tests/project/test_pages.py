"""The pages stay as short as a reader has time for, and those of the reference say on a code host, too, what each name
is."""

from __future__ import annotations

import re

from tests.project import api_tables

DOCS = api_tables.ROOT / "docs"
WORDS = 43_000
"""Words of the pages that a reader walks through, at most, without their programs. Evidence belongs into
examples/measurements. Raised only with a reason beside it: 700 are the page of timm and the section of nanoGPT, 700
what Accelerate counts and how whole batches are dealt, 500 lengths by epoch, 500 loaders built again and ledgers."""
CODE = re.compile(r"^( *)(`{3,})[^`\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LOOKED_UP = ("api", "appendix")
"""The reference, in which nobody reads on from one entry to the next."""


def test_the_pages_are_short() -> None:
    """Seen to fail: with the pages of 7f8b1ba8."""
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in LOOKED_UP]
    words = {str(page.relative_to(DOCS)): len(CODE.sub("", page.read_text()).split()) for page in pages}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda one: -one[1])


def test_the_reference_says_what_each_name_is_where_docstrings_are_not_shown() -> None:
    """Run tests/project/api_tables.py. Seen to fail: a docstring that was changed."""
    said = api_tables.sentences()
    stale = [
        page.name
        for page in (DOCS / "api").glob("*.md")
        if api_tables.page_with_table(page.read_text(), said) != page.read_text()
    ]
    assert stale == []


def test_what_a_page_links_outside_of_docs_has_a_page_on_the_site() -> None:
    """There it would be a download. Seen to fail: a program that programs.md lacks, and a table of measurements without
    a page."""
    links = {
        link
        for page in DOCS.rglob("*.md")
        for link in re.findall(r"\]\((?:\.\./)+((?:examples|tests|pipes)/[^)#]+)", page.read_text())
    }
    programs = re.findall(r"literalinclude\} \.\./\.\./(.+)", (DOCS / "appendix" / "programs.md").read_text())
    evidence = {f"examples/measurements/{page.name}" for page in (DOCS / "measurements").glob("*.md")}
    assert evidence == {
        f"examples/measurements/{page.name}" for page in (api_tables.ROOT / "examples" / "measurements").glob("*.md")
    }
    assert links - {*programs} - evidence == {"examples/tour.ipynb"}
