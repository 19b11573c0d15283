"""Process groups of the underlying library, for programs that pass them to it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.context import current_model
from unisono.topology import Group

__all__ = ("library_group",)


def library_group(group: Group) -> Any:
    """Return torch's process group if torch.distributed connects the ranks, else `group`."""
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    if current_model().adopt_group(nobody) is None:  # the ranks aren't connected by torch
        return group
    return nobody if group.handle is None else group.handle
