"""Jobs on other hosts: a command of the user's (--via) runs ``unisono top --packed`` there."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import repeat
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import psutil

from unisono.errors import ArgumentError
from unisono.observe.jobs import ObservedJob, job_of, stacks_of
from unisono.observe.stacks import Frame, Stack
from unisono.observe.verdict import Rank
from unisono.recording.status_page import ObservedCall, decode_ranks, encode_ranks

_LIMIT_S = 30.0  # srun may wait for a step, kubectl for a login, Python for a file server
_END_S = 2.0  # for a command to end after each signal
_ANSWER_S = 1.0  # for a rank to write its stack
# Characters per line: srun forwards 1,024 bytes at a time, so longer lines of different tasks would
# be mixed.
_WIDTH = 700
_LINE = re.compile(r"unisono-top (\S+) (\d+)/(\d+) ([A-Za-z0-9+/=]+)\s*$")
_LONGEST_QUOTE = 300  # characters
_NOT_FOUND = 127  # a shell's exit code
_REMEDY = (
    "; if unisono isn't on that host's PATH, end the command with that host's Python: "
    '"... python -m"'
)
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error)


def packed(jobs: Sequence[ObservedJob], version: str) -> Iterator[str]:
    """Encode jobs of this host, with the stack of each rank, as short lines."""
    found = [[job.name, job.at_ns, _encoded_ranks(job)] for job in jobs]
    about = {"version": version, "unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
    body = zlib.compress(json.dumps({**about, "jobs": found}).encode())
    text = base64.b64encode(body).decode()
    parts = [text[at : at + _WIDTH] for at in range(0, len(text), _WIDTH)]
    for number, part in enumerate(parts, 1):
        yield f"unisono-top {socket.gethostname()}-{os.getpid()} {number}/{len(parts)} {part}"


def _encoded_ranks(job: ObservedJob) -> list[dict[str, Any]]:
    """Encode the ranks of a job for JSON, with their stacks."""
    stacks = stacks_of(job.ranks, _ANSWER_S)
    found = []
    for rank in job.ranks:
        # A group's ranks are many, and the same in each call: they are sent in a short form.
        calls = [
            {**asdict(replace(call, ranks=())), "ranks": encode_ranks(call.ranks)}
            for call in rank.calls
        ]
        facts = asdict(replace(rank, calls=(), stacks=None))
        found.append({**facts, "calls": calls, "stacks": stacks[rank.rank]})
    return found


def jobs_via(commands: Sequence[str], version: str) -> tuple[list[ObservedJob], list[str]]:
    """Run all commands at once; return the jobs of their hosts, and the failures."""
    # All are parsed first, so that a malformed command is refused before another one runs.
    words = [_words(command) for command in commands]
    # Without --via there is no command, but an executor needs a thread.
    with ThreadPoolExecutor(max(len(commands), 1)) as executor:
        found = list(executor.map(_jobs_via, commands, words, repeat(version)))
    return [job for jobs, _ in found for job in jobs], [why for _, why in found if why]


def _words(command: str) -> list[str]:
    """Return the words of a command followed by those that it runs on its hosts."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ArgumentError(f"--via {command!r} is not a command: {error}") from None
    if not words:
        raise ArgumentError("--via is empty: name a command, such as --via 'ssh node2'")
    return [*words, "unisono", "top", "--packed"]


def _jobs_via(command: str, words: Sequence[str], version: str) -> tuple[list[ObservedJob], str]:
    """Run a command; return the jobs on its hosts, and its failure, empty if it succeeded."""
    begun_ns = time.time_ns()
    with TemporaryFile() as out, TemporaryFile() as err:  # a pipe would stay open in grandchildren
        why = _run(words, out, err)
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    jobs: list[ObservedJob] = []
    bodies, is_whole = _bodies(text)
    try:
        for body in bodies:
            plain = json.loads(zlib.decompress(base64.b64decode(body)))
            if plain["version"] != version:
                raise ValueError(f"unisono is {plain['version']} there and {version} here")
            jobs += _decoded_jobs(plain, begun_ns)
    # An earlier failure explains a later one. Jobs that could be read are kept.
    except _UNREADABLE as error:
        why = why or f"its answer cannot be read ({error}): install the same version there"
    if not is_whole:
        why = why or "a part of its answer is missing"
    elif not bodies:
        why = why or f"its output is not that of unisono top: {text.strip()[:_LONGEST_QUOTE]!r}"
    return jobs, why and f"--via {command!r}: {why}"


def _run(words: Sequence[str], out: BinaryIO, err: BinaryIO) -> str:
    """Run a command; return its failure, empty if it succeeded."""
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    except OSError as error:
        return f"it cannot be run: {error}"
    try:
        code = process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.Error):
            _end(psutil.Process(process.pid))
        process.poll()  # takes the exit code if it has ended, so that no zombie stays
        return f"it did not end within {_LIMIT_S:g} s"
    err.seek(0)
    quote = err.read().decode("utf-8", "replace").strip()[-_LONGEST_QUOTE:]
    remedy = _REMEDY if code == _NOT_FOUND else ""
    return f"exit code {code}{quote and f': {quote}'}{remedy}" if code else ""


def _end(command: psutil.Process) -> None:
    """End a command and its children, as far as this user may."""
    # The children of a process can't be found once it has ended.
    left = [command, *command.children(recursive=True)]
    for act in (psutil.Process.terminate, psutil.Process.kill):
        for each in left:
            with contextlib.suppress(psutil.Error):  # sudo may have made it another user's
                act(each)
        _, left = psutil.wait_procs(left, _END_S)


def _bodies(text: str) -> tuple[list[str], bool]:
    """Join the lines of each host; return also whether no line is missing."""
    # A launcher may put a prefix before each line, such as the number of a task.
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for each in filter(None, map(_LINE.search, text.splitlines())):
        found.setdefault(each[1], {})[int(each[2])] = each[4]
        counts[each[1]] = int(each[3])
    whole = [each for key, each in found.items() if len(each) == counts[key]]
    bodies = ["".join(part for _, part in sorted(each.items())) for each in whole]
    return bodies, len(whole) == len(found)


def _decoded_jobs(plain: dict[str, Any], begun_ns: int) -> list[ObservedJob]:
    """Decode jobs from `packed`, in the clock of this host."""
    # The times of day of two hosts may differ, but the jobs were encoded while the command ran.
    now_ns = time.time_ns()
    ago_ns = now_ns - min(max(plain["unix_ns"], begun_ns), now_ns)
    shift_ns = time.monotonic_ns() - ago_ns - plain["monotonic_ns"]
    return [
        job_of(name, [_decoded_rank(each, shift_ns) for each in ranks], at_ns + shift_ns)
        for name, at_ns, ranks in plain["jobs"]
    ]


def _decoded_rank(plain: dict[str, Any], shift_ns: int) -> Rank:
    calls = []
    for each in plain["calls"]:
        # The end of a call that isn't over is 0, and stays so.
        times = {key: each[key] and each[key] + shift_ns for key in ("begin_ns", "end_ns")}
        calls.append(ObservedCall(**{**each, **times, "ranks": decode_ranks(each["ranks"])}))
    stacks = plain["stacks"]
    if not isinstance(stacks, str):
        stacks = [Stack(ident, tuple(Frame(*each) for each in frames)) for ident, frames in stacks]
    made_ns = plain["made_ns"] + shift_ns
    return Rank(**{**plain, "calls": tuple(calls), "stacks": stacks, "made_ns": made_ns})
