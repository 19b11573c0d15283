"""The site, out of the repository's own pages: ``nox -s docs``.

In the repository's root, without nox: ``python -m sphinx -c docs . .nox/site``.

The source folder is the root, and not this folder, so that links between pages, the README of the
benchmarks, notebooks and programs are the same on the site and in a checkout.
"""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import unisono

ROOT = Path(__file__).parents[1]
WORDS = ("OpLike", "FoldLike", "GroupLike", "PathLike")  # docs/reference/index.md explains them
sys.path.insert(0, str(ROOT / "docs" / "extensions"))

project = "unisono"
author = "the unisono developers"
copyright = f"2026, {author}"
version = release = unisono.__version__
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "myst_nb",
    "docstrings",
    "command_line",
    "outside_links",
    "notebooks",
    "platforms",
]

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**.ipynb",
    "benchmarks/README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "examples/**.ipynb",
]
exclude_patterns = [".nox", ".git", ".cache", "**/.ipynb_checkpoints"]
html_extra_path = ["_root"]  # the first address leads to the index

nitpicky = True
# No build asks the network: names of other libraries stay without a link.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|typing|typing_extensions|collections|datetime|logging|enum|os)\..*"),
    (r"py:.*", r"(pathlib|concurrent|contextlib|abc|ignite|dist|nn|np)\..*"),
    (r"py:class", r"(unisono\..*\.)?([A-Z]|_\w+)"),  # variables of types, private types
    # Attributes of what a page shows whole, and classes of the model that no user meets.
    (
        r"py:(class|obj)",
        r"unisono\.(model|launchers|environments|payload|collectives|testing|observe)\..*",
    ),
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # `notebooks` runs them: one of them has to be interrupted

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: name for name in WORDS}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 60
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Warns", "params_style")]

copybutton_prompt_text = r">>> |\.\.\. |\$ |In \[\d*\]: "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's underlines modules, like links
# The repository, and where faults are reported, as soon as `[project.urls]` has them.
html_theme_options = {
    "footer_icons": [
        {"name": name, "url": url, "html": name, "class": ""}
        for name, url in (
            each.split(", ") for each in metadata("unisono").get_all("Project-URL", ())
        )
    ]
}
html_title = f"unisono {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False


def explain(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Node
) -> nodes.reference | None:
    """Lead from a word in a signature to the table that explains it."""
    if node["reftarget"].rpartition(".")[2] not in WORDS:
        return None
    page = "docs/reference/index"
    return make_refnode(app.builder, node["refdoc"], page, "words-in-signatures", text)


def setup(app: Sphinx) -> None:
    """Explain words in signatures."""
    app.connect("missing-reference", explain)
