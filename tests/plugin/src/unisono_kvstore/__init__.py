"""Replicas that meet in the job's key-value store: a whole model in 40 lines."""

import torch
from torch.distributed import TCPStore

from unisono import ComputationModel


class KvStoreModel(ComputationModel):
    name = "kvstore-dist"
    backends = ("kvstore",)
    dtypes = frozenset({torch.uint8, torch.float32, torch.int64})

    def __init__(self, info, timeout=None):
        self.info, self.calls = info, 0
        self.store = TCPStore(info.master_addr, info.master_port, is_master=False)

    @classmethod
    def from_context(cls, hint):
        return None  # nobody makes such a context by hand

    @classmethod
    def initialize(cls, backend, info, **options):
        return cls(info, **options)

    def finalize(self):
        self.store = None

    @property
    def topology(self):
        return self.info.topology()

    @property
    def device(self):
        return torch.device("cpu")

    def all_gather(self, tensor, group=None):
        self.calls += 1
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        self.store.set(f"{self.calls}/{self.info.rank}", data)
        size = self.info.world_size
        rows = bytearray().join(self.store.get(f"{self.calls}/{r}") for r in range(size))
        flat = torch.frombuffer(rows, dtype=tensor.dtype) if rows else tensor.new_empty(0)
        return flat.view(size, *tensor.shape)
