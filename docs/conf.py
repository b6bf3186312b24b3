"""How Sphinx builds the site from docs/ (`make site`); warnings are errors there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "penstock"
author = "The penstock authors"
copyright = author
version = release = penstock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
# `Loader` in a docstring is a link where there is such a name, and plain code where there is none
default_role = "py:obj"

# Markdown
myst_heading_anchors = 4  # links such as resume.md#corner-cases
myst_links_external_new_tab = False

# Docstrings
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    (name, "params_style") for name in ("DataLoader arguments", "Order", "Ranks", "Workers", "Errors")
]
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100  # one argument a line, where there are many

# Pages
html_theme = "furo"
html_title = "penstock"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"
pygments_dark_style = "monokai"


def outside(_app: Sphinx, _page: str, source: list[str]) -> None:
    """A code host shows what links to examples/ lead to.

    On the site these files would be downloads, so there such a link leads to a page that includes the file.
    """
    text = re.sub(r"\]\(((?:\.\./)*)\.\./examples/measurements/", r"](\1measurements/", source[0])
    source[0] = re.sub(r"\]\(((?:\.\./)*)\.\./examples/(\w+)\.py\)", r"](\1appendix/programs.md#\2py)", text)


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", outside)
