from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
seen = comm.allreduce(10 + rank)
names = comm.allgather(f"worker {rank}")
config = comm.bcast({"lr": 0.125} if rank == 0 else None, root=0)
print(f"rank {rank} of {size}: seen {seen}, {names}, {config}")
