"""The table of platforms and their variables, out of the code that reads them: ``.. platforms::``.

`rendered` needs no Sphinx, so that a test can see that no variable is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.environments.platforms import PLATFORMS, PORT, Platform

__all__ = ("rendered", "setup")

_COLUMNS = ("Platform", "Is there", "Node rank", "Nodes", "Node 0", "Port", "Ranks on a node")
_TITLES = {
    "kubeflow": "Kubeflow Trainer, PyTorchJob",
    "pai": "PAI DLC",
    "volcano": "Volcano",
    "pytorchjob": "older PyTorchJob",
    "stated": "UNISONO_RANK_COUNTS=nodes",
    "skypilot": "SkyPilot",
    "aws-batch": "AWS Batch",
    "sagemaker": "SageMaker",
    "azureml": "Azure Machine Learning",
    "pbs": "PBS, Torque",
    "sge": "Grid Engine",
    "tpu": "TPUs on GKE",
    "kubernetes": "Indexed Job, JobSet",
}
_DUMPS = Path(__file__).parents[2] / "tests" / "data" / "platforms"
_OF_TORCH = "https://pytorch.org/docs/stable/distributed.html#environment-variable-initialization"


def rendered() -> list[str]:
    """Write the table as lines of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (_COLUMNS, *map(_row, PLATFORMS)):
        lines += [f"   {'* -' if at == 0 else '  -'} {cell}" for at, cell in enumerate(row)]
    return lines


def _row(platform: Platform) -> tuple[str, ...]:
    hosts = _names(platform.hosts)
    hosts = f"the file {hosts}" if platform.starts == "first node" else hosts
    own = _names([name for name in platform.marks if name not in platform.hosts])
    place = f"place in {hosts}" + (f" of {own}" if own else "")
    return (
        f"`{_TITLES[platform.NAME]} <{_documentation(platform)}>`__ (``{platform.NAME}``)",
        _names(platform.marks),
        _names(platform.node_rank) or place,
        " or ".join(filter(None, (_names(platform.nnodes), hosts and f"length of {hosts}"))),
        " or ".join(filter(None, (_names(platform.leader), hosts and f"first of {hosts}"))),
        f"{_names(platform.port)}, else {PORT}",
        _names(platform.nproc_per_node) or "-",
    )


def _documentation(platform: Platform) -> str:
    """Return the page that the platform's dumps were written from, which is their second line."""
    dump = _DUMPS / f"{platform.NAME}.node1.env"
    if platform.NAME == "stated":
        return _OF_TORCH
    return dump.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")


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
