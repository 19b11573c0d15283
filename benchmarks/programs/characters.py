"""Train a small model of characters on several ranks, in the shape of nanoGPT's train.py."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, width, heads, layers = 4, 16, 32, 2, 2
learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 2, 12
eval_interval, eval_iters, gradient_accumulation_steps, grad_clip = 4, 2, 4, 1.0


class Block(nn.Module):
    """Attention to earlier characters, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block finds."""
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A transformer whose head has the embedding's weights."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)), nn.LayerNorm(width))
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        return F.cross_entropy(self.lm_head(self.blocks(x)).flatten(0, 1), targets.flatten())


def prepare(folder: Path) -> None:
    """Write the characters of Python's own documentation of floats as numbers, and their names."""
    text = (float.__doc__ or "") + (str.__doc__ or "") + (int.__doc__ or "")
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    ids[: len(ids) * 9 // 10].tofile(folder / "train.bin")
    ids[len(ids) * 9 // 10 :].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(chars)}))


def get_batch(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pieces of the text."""
    data = np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return x, y


def get_lr(it: int) -> float:
    """Warm up, then follow a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(folder: Path, model: nn.Module) -> dict[str, float]:
    """Return the mean loss of a few batches of each split."""
    model.eval()
    found = {}
    for split in ("train", "val"):
        losses = [model(*get_batch(folder, split)).item() for _ in range(eval_iters)]
        found[split] = sum(losses) / len(losses)
    model.train()
    return found


def main(folder: Path) -> None:
    """Train."""
    ddp_rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_process_group("gloo")
    torch.manual_seed(1337 + ddp_rank)
    prepare(folder)
    meta = pickle.loads((folder / "meta.pkl").read_bytes())
    raw_model = GPT(meta["vocab_size"])
    model = DDP(raw_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0 and ddp_rank == 0:
            losses = estimate_loss(folder, raw_model)
            print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        steps = gradient_accumulation_steps // world_size
        for micro_step in range(steps):
            is_last = micro_step == steps - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*get_batch(folder, "train")) / steps
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ddp_rank == 0:
            print(f"iter {iter_num}: loss {loss.item() * steps:.4f}")
    destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
