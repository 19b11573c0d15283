"""Links to what is in the repository and isn't a page: README is the index, folders are text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class OutsideLinks(SphinxTransform):
    """Settle links before Sphinx looks for their pages."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Go through the links of a page."""
        for node in list(self.document.findall(pending_xref)):
            if node.get("reftype") != "myst":
                continue
            if node.get("refdomain") == "doc" and node["reftarget"] == "README":
                self._lead_to(node, str(self.config.root_doc))
            elif node.get("refdomain") is None:
                self._settle_folder(node)

    def _settle_folder(self, node: nodes.Element) -> None:
        """Lead to the README of a folder; keep the text alone if the site hasn't one."""
        target = str(node["reftarget"]).partition("#")[0]
        _, path = self.env.relfn2path(target, self.env.docname)
        page = self.env.path2doc(f"{path}/README.md")
        if page in self.env.found_docs:
            self._lead_to(node, page)
        elif Path(path).is_dir():
            node.replace_self(nodes.inline("", "", *node.children))

    def _lead_to(self, node: nodes.Element, page: str) -> None:
        link = pending_xref(
            "",
            nodes.inline("", node.astext(), classes=["xref", "myst"]),
            refdomain="doc",
            reftarget=page,
            reftargetid=None,
            refdoc=self.env.docname,
            reftype="myst",
            refexplicit=True,
        )
        node.replace_self(link)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the transform."""
    app.add_transform(OutsideLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
