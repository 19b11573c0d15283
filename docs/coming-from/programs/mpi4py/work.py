from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
mine = comm.scatter([[1, 2, 3], [4, 5]] if rank == 0 else None, root=0)
squares = comm.gather([x**2 for x in mine], root=0)
if rank == 0:
    comm.send(squares, dest=1)
else:
    squares = comm.recv(source=0)
print(f"rank {rank}: {mine}, {squares}")
