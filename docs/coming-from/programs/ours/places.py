import tempfile
from pathlib import Path

import unisono as idist


@idist.one_rank_only(with_barrier=True)
def save(path):
    path.write_text(f"saved by {idist.get_rank()}")


def main(local_rank, path):
    save(path)
    rank, size = idist.get_rank(), idist.get_world_size()
    place = f"{local_rank} of {idist.get_nproc_per_node()} on node {idist.get_node_rank()}"
    return f"rank {rank} of {size} is {place}, {path.read_text()}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for line in idist.spawn("gloo", main, (Path(folder) / "notes.txt",), nproc_per_node=2):
            print(line)
