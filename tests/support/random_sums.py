"""Ten thousand sums whose bits depend on the order of plain additions."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

import unisono as idist
from unisono.testing.cases.sums import correctly_rounded

COUNT, TERMS = 10_000, 8
SIZES = (1, 2, 3, 4, 8)
_SPREADS = {torch.float32: 60, torch.float64: 480}


def terms(dtype: torch.dtype) -> Tensor:
    """Make [TERMS, COUNT] terms with very different exponents, subnormal or cancelling ones."""
    generator = torch.Generator().manual_seed(19)
    shape, spread = (TERMS, COUNT), _SPREADS[dtype]
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = torch.ldexp(values, torch.randint(-spread, spread, shape, generator=generator))
    values = values.to(dtype)
    tenth = COUNT // 10
    values[:, :tenth] = values[:, :tenth].sign() * torch.finfo(dtype).smallest_normal / 8
    values[4:, tenth : 3 * tenth] = -values[:4, tenth : 3 * tenth]  # these sums are 0,
    values[7, 2 * tenth : 3 * tenth] *= 1 + 2**-20  # or here almost 0
    values[1, 3 * tenth : 4 * tenth] = values[0, 3 * tenth : 4 * tenth] * torch.finfo(dtype).eps / 2
    return values


def digest_wanted(dtype: torch.dtype) -> str:
    """Return the hash of reference sums, made by Python's `fsum` or from fractions."""
    columns = terms(dtype).double().T.tolist()
    if dtype is torch.float64:
        sums = [math.fsum(column) for column in columns]
    else:
        sums = [correctly_rounded(column, dtype) for column in columns]
    return digest_of(torch.tensor(sums, dtype=torch.float64).to(dtype))


def digest_of(total: Tensor) -> str:
    return hashlib.sha256(total.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digest(local_rank: int, dtype: torch.dtype) -> set[str]:
    """Sum the terms, distributed over the ranks in two ways; return the hashes of the sums."""
    rank, size, every = idist.get_rank(), idist.get_world_size(), terms(dtype)
    parts = every[rank::size], every.flip(0)[: TERMS if rank == 0 else 0]
    found = {digest_of(idist.exact_sum(part)) for part in parts}
    if size == TERMS:
        found.add(digest_of(idist.all_reduce(every[TERMS - 1 - rank], exact=True)))
    return found


def plain_digest(local_rank: int, dtype: torch.dtype) -> str:
    """Return the hash of the sums by plain additions."""
    rank, size = idist.get_rank(), idist.get_world_size()
    return digest_of(idist.all_reduce(terms(dtype)[rank::size].sum(0)))
