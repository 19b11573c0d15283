"""The tests on the pattern of DeepSpeed's ``tests/unit/common.py``, written anew for this session.

As there, a test is a method of a class. A pool of processes of the fork server is made for each
test, its ranks initialise gloo, run the method and are ended. What is left out here: the half
second that the pattern sleeps after each test.
"""

from __future__ import annotations

import inspect
import os
import socket
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from how_many import VALUES

TIMEOUT_S = 600


class DistributedTest:
    """Runs a method of its subclasses in processes of its own."""

    is_dist_test: ClassVar[bool] = True
    world_size: ClassVar[int] = 2
    backend: ClassVar[str] = "gloo"

    def __call__(self, request: pytest.FixtureRequest) -> None:
        """Start ranks, run the test's method in each, and end them."""
        method = request.node.originalname
        names = inspect.signature(getattr(self, method)).parameters
        fixtures = {name: request.getfixturevalue(name) for name in names}
        mp.set_start_method("forkserver", force=True)
        port = free_port()
        with mp.Pool(processes=self.world_size) as pool:
            places = [(rank, port, method, fixtures) for rank in range(self.world_size)]
            pool.starmap_async(self.run_in_rank, places).get(TIMEOUT_S)
            pool.starmap(destroy, [() for _ in places])
            pool.close()
            pool.join()

    def run_in_rank(self, rank: int, port: int, method: str, fixtures: dict[str, Any]) -> None:
        """Join the group and run the test. Collective over all ranks."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.world_size))
        dist.init_process_group(self.backend, rank=rank, world_size=self.world_size)
        dist.barrier()
        getattr(self, method)(**fixtures)


def destroy() -> None:
    """Leave the group, where there is one; a process may be given none or two of these calls."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """Give a port that is free by now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class TestSum(DistributedTest):
    """The tests themselves."""

    @pytest.mark.parametrize("value", VALUES)
    def test_sum(self, value: int) -> None:
        """Sum a tensor over two ranks."""
        total = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(total)
        assert total.item() == 2 * value + 1
