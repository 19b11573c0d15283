"""The table of platforms and their variables, out of the code that reads them: ``.. platforms::``.

`rendered` needs no Sphinx, so that a test can see that no variable is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.environments.platforms import PLATFORMS, PORT, Platform

__all__ = ("rendered", "setup")

_COLUMNS = ("Platform", "Is there", "Node rank", "Nodes", "Node 0", "Port", "Ranks on a node")


def rendered() -> list[str]:
    """Write the table as lines of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (_COLUMNS, *map(_row, PLATFORMS)):
        lines += [f"   {'* -' if at == 0 else '  -'} {cell}" for at, cell in enumerate(row)]
    return lines


def _row(platform: Platform) -> tuple[str, ...]:
    hosts = _hosts(platform)
    main = f"; {_names(platform.main)} is node 0" if platform.main else ""
    place = f"place in {hosts}" + (
        f" of {_names(platform.hosts.own)}" if platform.hosts and platform.hosts.own else ""
    )
    return (
        f"`{platform.title} <{platform.documentation}>`__ (``{platform.NAME}``)",
        _names(platform.marks),
        (_names(platform.node_rank) or place) + main,
        " or ".join(filter(None, (_names(platform.nnodes), hosts and f"length of {hosts}"))),
        " or ".join(filter(None, (_names(platform.leader), hosts and f"first of {hosts}"))),
        f"{_names(platform.port)}, else {PORT}",
        _names(platform.nproc_per_node) or "-",
    )


def _hosts(platform: Platform) -> str:
    if platform.hosts is None:
        return ""
    pattern = (platform.hosts.pattern or "").replace("[A-Z0-9_]+", "TASK")
    names = _names(platform.hosts.variables or (pattern,))
    return f"the file {names}" if platform.hosts.is_file else names


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"``{name}``" for name in names)


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class Platforms(SphinxDirective):  # type: ignore[misc, unused-ignore]
        def run(self) -> list[nodes.Node]:
            holder = nodes.container()
            lines = StringList(rendered(), source="unisono.environments.platforms")
            self.state.nested_parse(lines, self.content_offset, holder)
            return list(holder.children)

    app.add_directive("platforms", Platforms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
