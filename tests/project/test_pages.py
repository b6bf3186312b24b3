"""The pages stay as short as a reader has time for, and those of the reference say on a code host, too, what each name is."""

from __future__ import annotations

from tests.project import api_tables

DOCS = api_tables.ROOT / "docs"
WORDS = 40_000
"""Words of the pages that a reader walks through, at most, code included. Evidence belongs into examples/measurements. Raised only with a reason beside it."""
LOOKED_UP = ("api", "appendix")
"""The reference, in which nobody reads on from one entry to the next."""


def test_the_pages_are_short() -> None:
    words = {page: len(page.read_text().split()) for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in LOOKED_UP}
    assert sum(words.values()) <= WORDS, sorted(((count, page.name) for page, count in words.items()), reverse=True)


def test_the_reference_says_what_each_name_is_where_docstrings_are_not_shown() -> None:
    """Run tests/project/api_tables.py. Seen to fail: a docstring that was changed."""
    said = api_tables.sentences()
    stale = [page.name for page in (DOCS / "api").glob("*.md") if api_tables.page_with_table(page.read_text(), said) != page.read_text()]
    assert stale == []
