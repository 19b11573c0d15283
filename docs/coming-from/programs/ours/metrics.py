import unisono as idist


@idist.master_only
def write(text):
    return f"wrote {text}"


def main(local_rank):
    rank = idist.get_rank()
    metrics = idist.reduce_dict({"loss": 0.5 + rank, "accuracy": 0.25 * rank})
    written = write(f"loss {metrics['loss']}, accuracy {metrics['accuracy']}")
    return f"rank {rank}: {written}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
