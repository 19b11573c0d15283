"""The control plane's connections, against what they promise, up to 10,000 ranks."""

from __future__ import annotations

import math
import random

import pytest

from unisono.control.tree import Links, links

SHAPES = {
    "one rank": [0],
    "one host": [0] * 9,
    "a rank on each host": list(range(300)),
    "eight on each host": [rank // 8 for rank in range(512)],
    "hosts in turns": [rank % 50 for rank in range(300)],
    "hosts of different size": [0] * 5 + [1] + [2] * 40 + list(range(3, 40)),
    "hosts at random": random.Random(0).choices(range(60), k=300),
}


def places_on(hosts: list[int]) -> list[list[int]]:
    places: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        places.setdefault(host, []).append(place)
    return list(places.values())


@pytest.mark.parametrize("fan_out", [1, 2, 8, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_reaches_one_that_hears_of_all(shape: str, fan_out: int) -> None:
    hosts = SHAPES[shape]
    size = len(hosts)
    parts = [links(places_on(hosts), place, fan_out) for place in range(size)]
    first = {host: hosts.index(host) for host in hosts}
    roots = [place for place, part in enumerate(parts) if part.up is None]
    is_direct = len(first) <= fan_out + 1
    assert roots == (sorted(first.values()) if is_direct else [0])
    beneath: list[set[int]] = [{place} for place in range(size)]  # by walking up from each rank
    for place in range(size):
        seen, at = {place}, place
        while (up := parts[at].up) is not None:
            assert up not in seen
            assert at in parts[up].downs
            at = up
            seen.add(at)
            beneath[at].add(place)
        assert at in roots
    assert sorted(place for root in roots for place in beneath[root]) == [*range(size)]
    for place, part in enumerate(parts):
        assert set(part.across) == ({*roots} - {place} if place in roots else set())
        assert set(part.downs) == {d for d in range(size) if parts[d].up == place}
        assert set(part.behind) == {*part.downs, *part.across}
        for near, behind in part.behind.items():
            assert behind[0] == near
            assert len(behind) == len(set(behind))
            assert set(behind) == beneath[near]
        is_leader = first[hosts[place]] == place
        others = [near for near in part.behind if hosts[near] != hosts[place]]
        assert len(others) <= fan_out
        assert is_leader or (part.up, part.behind) == (first[hosts[place]], {})
        if is_leader and part.up is not None:
            assert first[hosts[part.up]] == part.up


@pytest.mark.parametrize("per_host", [1, 8])
@pytest.mark.parametrize("size", [1000, 10_000])
def test_it_is_as_deep_as_the_logarithm_of_the_hosts(size: int, per_host: int) -> None:
    fan_out, hosts = 8, [rank // per_host for rank in range(size)]
    places = places_on(hosts)
    root = links(places, 0, fan_out)
    assert sorted(place for behind in root.behind.values() for place in behind) == [*range(1, size)]
    nodes = math.ceil(size / per_host)
    leaders, at_most = 0, 1  # a full tree of so many layers of leaders holds them all
    while at_most < nodes:
        leaders += 1
        at_most += fan_out**leaders
    found: dict[int, Links] = {}
    for place in [*random.Random(size).sample(range(size), 20), size - 1]:
        depth, at = -1, place
        up: int | None = place
        while up is not None:
            depth, at = depth + 1, up
            part = found.get(at) or links(places, at, fan_out)
            found[at], up = part, part.up
            assert len(part.downs) <= fan_out + per_host - 1
        assert at == 0
        assert depth <= leaders + (per_host > 1)
