"""What environments have in common: variables as numbers and addresses, checked; ports of jobs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import EnvironmentDetectionError
from unisono.topology import RankInfo

RANK_COUNTS = "UNISONO_RANK_COUNTS"
"""Variable that says whether RANK and WORLD_SIZE count ``nodes`` or ``ranks``."""

_DIGITS = re.compile(r"[0-9]{1,20}")
_MOST = 2**31 - 1  # MPI and torch keep ranks and sizes in a C int
_SHOWN = 60


def shown(value: str) -> str:
    """Quote a variable's value for a message."""
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."


@dataclass(frozen=True, slots=True)
class Number:
    """A number and the variable that said it."""

    variable: str
    value: int

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True, slots=True)
class Reader:
    """Variables seen with the eyes of one environment. A blank variable counts as not set."""

    env: Mapping[str, str]
    source: str
    remedy: str

    def error(self, message: str, variable: str, value: str | None) -> EnvironmentDetectionError:
        """Make the error for one variable."""
        text = f"{self.source} environment: {message}; {self.remedy}"
        return EnvironmentDetectionError(text, source=self.source, variable=variable, value=value)

    def text(self, *names: str) -> tuple[str, str] | None:
        """Find the first variable that is set."""
        for name in names:
            value = self.env.get(name)
            if value is not None and value.strip():
                return name, value.strip()
        return None

    def has(self, *names: str) -> bool:
        """Say whether at least one of the variables is set."""
        return self.text(*names) is not None

    def number(self, *names: str, least: int = 0, most: int = _MOST) -> Number | None:
        """Read a whole number from the first variable that is set."""
        variable = self.text(*names)
        if variable is None:
            return None
        name, value = variable
        if not _DIGITS.fullmatch(value):
            what = (
                "is negative"
                if _DIGITS.fullmatch(value[1:]) and value[0] == "-"
                else ("is not a whole number")
            )
            raise self.error(f"{name}={shown(value)} {what}", name, value)
        if not least <= int(value) <= most:
            message = f"{name}={shown(value)} is out of range ({least} to {most})"
            raise self.error(message, name, value)
        return Number(name, int(value))

    def needed(self, *names: str, least: int = 0, most: int = _MOST) -> Number:
        """Read a whole number that has to be there."""
        number = self.number(*names, least=least, most=most)
        if number is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            message = f"{names[0]}{others} is not set, though others of its variables are"
            raise self.error(message, names[0], None)
        return number

    def address(self) -> str | None:
        """Read the host of the rendezvous, MASTER_ADDR."""
        variable = self.text("MASTER_ADDR")
        return None if variable is None else self.host(*variable)

    def host(self, name: str, value: str) -> str:
        """Check that a host can be named so."""
        if not 0 < len(value) <= 255 or not value.isprintable() or any(map(str.isspace, value)):
            raise self.error(f"{name}={shown(value)} is not the name of a host", name, value)
        return value

    def port(self) -> int | None:
        """Read the port of the rendezvous, MASTER_PORT."""
        number = self.number("MASTER_PORT", least=1, most=65535)
        return None if number is None else number.value


def counts_nodes(reader: Reader) -> bool | None:
    """Read what RANK and WORLD_SIZE count by the user's own word."""
    said = reader.text(RANK_COUNTS)
    if said is not None and said[1] not in ("nodes", "ranks"):
        raise reader.error(f"{said[0]}={shown(said[1])} should be nodes or ranks", *said)
    return None if said is None else said[1] == "nodes"


@dataclass(frozen=True, slots=True)
class UncheckedInfo:
    """What the variables say, before it is known whether that fits together."""

    rank: Number
    world_size: Number
    local_rank: Number | None = None
    local_world_size: Number | None = None
    node_rank: Number | None = None
    nnodes: Number | None = None
    master_addr: str | None = None
    master_port: int | None = None
    store_is_hosted: bool = False
    job_id: str | None = None


def make_info(reader: Reader, unchecked: UncheckedInfo) -> RankInfo:
    """Check that the numbers fit together and make the facts of them."""
    # What follows from them is added: a job whose node holds all its replicas has one node.
    world_size, local_world_size = unchecked.world_size, unchecked.local_world_size
    node_rank, nnodes = unchecked.node_rank, unchecked.nnodes
    _require_below(reader, unchecked.rank, world_size)
    _require_below(reader, unchecked.local_rank, local_world_size or world_size)
    if local_world_size is not None and local_world_size.value == world_size.value:
        nnodes = nnodes or Number(local_world_size.variable, 1)
        node_rank = node_rank or Number(local_world_size.variable, 0)
    _require_below(reader, node_rank, nnodes or world_size)
    _require_fit(reader, world_size, local_world_size, nnodes)
    if nnodes is not None and nnodes.value == 1:
        local_world_size, node_rank = world_size, Number(nnodes.variable, 0)
    return RankInfo(
        unchecked.rank.value,
        world_size.value,
        _value(unchecked.local_rank),
        _value(local_world_size),
        _value(node_rank),
        _value(nnodes),
        unchecked.master_addr,
        unchecked.master_port,
        reader.source,
        unchecked.store_is_hosted,
        job_id=unchecked.job_id,
    )


def _value(number: Number | None) -> int | None:
    return None if number is None else number.value


def _require_below(reader: Reader, number: Number | None, limit: Number) -> None:
    if number is not None and number.value >= limit.value:
        message = f"{number} is out of range: {limit} allows 0 to {limit.value - 1}"
        raise reader.error(message, number.variable, str(number.value))


def _require_fit(
    reader: Reader, world: Number, local: Number | None, nnodes: Number | None
) -> None:
    """Refuse nodes without a replica, and replicas that no node could hold."""
    here = 1 if local is None else local.value
    others = 0 if nnodes is None else nnodes.value - 1
    if here + others > world.value or (others == 0 and nnodes and local and here < world.value):
        fault = local or nnodes or world
        numbers = " and ".join(str(number) for number in (local, nnodes, world) if number)
        message = f"{numbers} contradict each other: each node holds at least one of the replicas"
        raise reader.error(message, fault.variable, str(fault.value))


# Below 29500, torch's own default, and below the ephemeral ports of every common system (Linux
# takes them from 32768), so that no outgoing connection sits on a derived port by accident.
_FIRST = 20000
_COUNT = 9473  # a prime: jobs and steps that are near each other never share a port
_STRIDE = 97


def port_of(job: str, step: str = "0") -> int:
    """Derive the rendezvous port of a job, the same on every rank."""
    # Ids that are numbers are laid out so that 97 consecutive jobs with up to 97 steps each
    # have ports of their own; other ids are hashed.
    return _FIRST + (_number(job) * _STRIDE + _number(step)) % _COUNT


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))
