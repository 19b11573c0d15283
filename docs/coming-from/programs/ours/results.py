import unisono as idist


def main(local_rank):
    dataset = list(range(7))
    sampler = idist.EvaluationSampler(dataset)  # 4 rows and 3: none twice
    part = [dataset[index] ** 2 for index in sampler]
    results = idist.gather_results(part, len(dataset))
    rank = idist.get_rank()
    return f"rank {rank}: {results if rank == 0 else None}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
