"""Reader of one environment's variables, as checked texts, numbers and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from unisono.errors import EnvironmentDetectionError

RANK_COUNTS = "UNISONO_RANK_COUNTS"
"""Variable that states whether RANK and WORLD_SIZE count ``nodes`` or ``ranks``."""

_DIGITS = re.compile(r"-?[0-9]{1,20}")
_MOST = 2**31 - 1  # MPI and torch keep ranks and sizes in a C int
_SHOWN = 60  # characters of a value


def shown(value: str) -> str:
    """Return a value, quoted and shortened, for a message."""
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."


class Recorder(Mapping[str, str]):
    """Read-only view of variables that records the names read, and their values."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.read: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> str:
        self.read[name] = self._env.get(name)
        return self._env[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)


@dataclass(frozen=True, slots=True)
class Number:
    """A number and its variable."""

    variable: str
    value: int

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True, slots=True)
class Reader:
    """Variables of one environment. A blank variable counts as not set."""

    env: Mapping[str, str]
    source: str
    remedy: str

    def error(self, message: str, variable: str, value: str | None) -> EnvironmentDetectionError:
        """Build the error for one variable."""
        text = f"{self.source} environment: {message}; {self.remedy}"
        return EnvironmentDetectionError(text, source=self.source, variable=variable, value=value)

    def matching(self, pattern: str) -> list[str]:
        """Return the names of set variables that match a pattern such as ``VC_*_HOSTS``."""
        return sorted(name for name in self.env if fnmatchcase(name, pattern) and self.has(name))

    def text(self, *names: str) -> tuple[str, str] | None:
        """Return the name and the text of the first variable that is set."""
        for pattern in names:
            for name in self.matching(pattern) if "*" in pattern else (pattern,):
                value = self.env.get(name, "").strip()
                if value:
                    return name, value
        return None

    def value(self, *names: str) -> str | None:
        """Return the text of the first variable that is set."""
        variable = self.text(*names)
        return None if variable is None else variable[1]

    def has(self, *names: str) -> bool:
        """Return whether at least one of the variables is set."""
        return self.text(*names) is not None

    def number(self, *names: str, least: int = 0, most: int = _MOST) -> Number | None:
        """Return the whole number in the first variable that is set."""
        variable = self.text(*names)
        if variable is None:
            return None
        name, value = variable
        if not _DIGITS.fullmatch(value):
            raise self.error(f"{name}={shown(value)} is not a whole number", name, value)
        if value[0] == "-":
            raise self.error(f"{name}={shown(value)} is negative", name, value)
        if not least <= int(value) <= most:
            message = f"{name}={shown(value)} is out of range ({least} to {most})"
            raise self.error(message, name, value)
        return Number(name, int(value))

    def needed(self, *names: str, least: int = 0, most: int = _MOST) -> Number:
        """Return the whole number in the first variable that is set; raise if none is set."""
        number = self.number(*names, least=least, most=most)
        if number is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            message = f"{names[0]}{others} is not set, though others of its variables are"
            raise self.error(message, names[0], None)
        return number

    def below(self, number: Number, limit: int, source: object) -> int:
        """Return the number; raise if it isn't below the limit that `source` imposes."""
        if number.value >= limit:
            message = f"{number} is out of range: {source} allows 0 to {limit - 1}"
            raise self.error(message, number.variable, str(number.value))
        return number.value

    def host(self, name: str, value: str) -> str:
        """Return the value of a variable as a host's name; raise if no host can have that name."""
        if not 0 < len(value) <= 255 or not value.isprintable() or any(map(str.isspace, value)):
            raise self.error(f"{name}={shown(value)} is not the name of a host", name, value)
        return value

    def address(self) -> str | None:
        """Return the host of the rendezvous, MASTER_ADDR."""
        variable = self.text("MASTER_ADDR")
        return None if variable is None else self.host(*variable)

    def port(self) -> int | None:
        """Return the port of the rendezvous, MASTER_PORT."""
        number = self.number("MASTER_PORT", least=1, most=65535)
        return None if number is None else number.value

    def counts_nodes(self) -> bool | None:
        """Return whether RANK and WORLD_SIZE count nodes, None if the user doesn't state it."""
        stated = self.text(RANK_COUNTS)
        if stated is not None and stated[1] not in ("nodes", "ranks"):
            raise self.error(f"{stated[0]}={shown(stated[1])} should be nodes or ranks", *stated)
        return None if stated is None else stated[1] == "nodes"
