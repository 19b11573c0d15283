"""Reinforcement learning: every worker plays episodes, rank 0 learns from all of them.

    python examples/actors.py                           alone
    python -m unisono run -n 3 examples/actors.py       three processes

Each round, rank 0 sends the policy to all workers, they play their share of the episodes, rank 0
gathers these and improves the policy (REINFORCE). The dice of an episode are its own, so that any
number of workers plays the same episodes. Needs nothing besides unisono.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import unisono as idist

STEPS = 100  # of an episode, at most; as many is what can be reached
DTYPE = torch.float64


def move(states: Tensor, pushes: Tensor) -> Tensor:
    """Balance a pole on a cart for 0.02 s: states [n, 4], pushes [n] to the left (0) or right."""
    x, speed, angle, spin = states.unbind(1)
    force = 20.0 * pushes - 10.0
    sine, cosine = angle.sin(), angle.cos()
    drive = (force + 0.05 * spin**2 * sine) / 1.1  # cart 1 kg, pole 0.1 kg and 1 m long
    turn = (9.8 * sine - cosine * drive) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    push = drive - 0.05 * turn * cosine / 1.1
    changes = torch.stack([speed, push, spin, turn], 1)
    return states + 0.02 * changes


def play(policy: nn.Module, numbers: range, seed: int) -> dict[str, Tensor]:
    """Play the episodes with these numbers, all at once: [episodes, steps, ...]."""
    dice = [torch.Generator().manual_seed(seed * 1_000_003 + number) for number in numbers]
    rolls = [torch.rand(STEPS + 4, generator=die, dtype=DTYPE) for die in dice]
    table = torch.stack(rolls) if rolls else torch.empty(0, STEPS + 4, dtype=DTYPE)
    states = 0.1 * table[:, STEPS:] - 0.05
    is_up = torch.ones(len(numbers), dtype=torch.bool)
    seen, pushes, counts = [], [], []
    for step in range(STEPS):
        with torch.no_grad():
            to_the_right = policy(states)[:, 0].sigmoid()
        push = (table[:, step] < to_the_right).to(DTYPE)
        seen.append(states)
        pushes.append(push)
        counts.append(is_up)
        states = move(states, push)
        is_up = is_up & (states[:, 0].abs() < 2.4) & (states[:, 2].abs() < 0.21)
    return {
        "states": torch.stack(seen, 1),
        "pushes": torch.stack(pushes, 1),
        "counts": torch.stack(counts, 1).to(DTYPE),  # 1 until the pole fell
    }


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, played: dict[str, Tensor]) -> float:
    """Improve the policy on rank 0; give how many steps the poles stood, on average."""
    counts = played["counts"]
    to_go = counts.flip(1).cumsum(1).flip(1)  # steps that were still to come
    mean = to_go.sum(0) / counts.sum(0).clamp(min=1)
    advantage = (to_go - mean) * counts
    logits = policy(played["states"])[..., 0]
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits, played["pushes"], reduction="none"
    )
    optimizer.zero_grad()
    ((losses * advantage).sum() / counts.sum() / to_go.std()).backward()
    optimizer.step()
    return float(counts.sum(1).mean())


def work(local_rank: int, rounds: int, episodes: int, seed: int) -> list[float]:
    """Do one worker's part; every worker gets the mean steps of each round."""
    torch.set_num_threads(1)  # the workers share this machine's cores
    rank, world_size = idist.get_rank(), idist.get_world_size()
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(DTYPE)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    history = []
    for round_ in range(rounds):
        idist.broadcast_params(policy)
        mine = range(rank, episodes, world_size)
        played = idist.gather(play(policy, mine, seed + round_), dst=0)
        steps = 0.0
        if played is not None:  # rank 0, the learner
            whole: dict[str, Any] = {
                name: torch.cat([part[name] for part in played]) for name in played[0]
            }
            steps = learn(policy, optimizer, whole)
            if (round_ + 1) % 10 == 0:
                print(f"round {round_ + 1}: {steps:.1f} of {STEPS} steps")
        history.append(idist.broadcast(steps, src=0))
    return history


def count(text: str) -> int:
    """Read a number of at least 1 from the command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    """Read the command line, play and learn."""
    parser = argparse.ArgumentParser(description="Learn to balance a pole with many actors.")
    parser.add_argument("--backend", help="such as gloo, mpi4py, threads")
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--episodes", type=count, default=24, help="of all workers, in each round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        with idist.Parallel(options.backend) as parallel:
            parallel.run(work, options.rounds, options.episodes, options.seed)
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
