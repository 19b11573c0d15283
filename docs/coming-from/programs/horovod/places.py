import tempfile
from pathlib import Path

import horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
folder = hvd.broadcast_object(tempfile.mkdtemp() if rank == 0 else "", root_rank=0)
path = Path(folder) / "notes.txt"
if rank == 0:
    path.write_text(f"saved by {rank}")
hvd.barrier()
place = f"{hvd.local_rank()} of {hvd.local_size()} on node {hvd.cross_rank()}"
print(f"rank {rank} of {size} is {place}, {path.read_text()}")
hvd.shutdown()
