"""A pool's replica: runs the calls that arrive as tasks on its channel."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from unisono import context
from unisono.errors import CollectiveError, PayloadError
from unisono.launchers.job import channel
from unisono.launchers.job.failure import chain
from unisono.launchers.job.lifetime import flush, forks_end_here
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import describe
from unisono.model.contract import ComputationModel
from unisono.pickling import dumps
from unisono.recording import stack_signal

READY = b"y"  # with the replica's process, threads, and the facts of `stack_signal`
LEFT = b"l"  # the end was received; threads and exit handlers may still run
ANSWER = b"a"
FAILED = b"f"
BROKEN = b"b"  # as FAILED, by an error that leaves the context unusable


def serve(
    local_rank: int,
    owner: int,
    ends: Sequence[socket.socket] = (),
    models: dict[int, ComputationModel] | None = None,
) -> None:
    """Run calls until the pool sends the end; `ends` are the channels of thread replicas."""
    own = channel.OwnChannel(ends[local_rank]) if ends else channel.OWN.get()
    is_process = os.getpid() != owner
    if models is not None:
        models[local_rank] = context.current_model()  # for `Replicas.abort` in the pool's thread
    ids = os.getpid(), threading.get_ident(), threading.get_native_id()
    channel.send(own.socket, READY, pickle.dumps((*ids, stack_signal.install())))
    with suppress(OSError):  # the pool has ended, and this replica ends with it
        while task := own.next_task():  # empty at the end, None once the pool's process is gone
            channel.send(own.socket, *_outcome(local_rank, task, is_process))
        channel.send(own.socket, LEFT)
        if ends:  # a process sends it on exit, in `unisono.launchers.job.worker.work`
            channel.send(own.socket, channel.RESULT)


def _outcome(local_rank: int, body: bytes, is_process: bool) -> tuple[bytes, bytes]:
    """Run one call; return the kind and the body of its answer."""
    try:
        fn, args, kwargs, takes_rank = load_from_parent(body, defines=is_process)
        with forks_end_here():
            result = fn(local_rank, *args, **kwargs) if takes_rank else fn(*args, **kwargs)
        try:
            return ANSWER, dumps(result)
        except Exception as error:  # an object's own __reduce__ may raise any exception
            kind = type(result).__qualname__
            raise PayloadError(f"the result, a {kind}, can't be pickled: {error}") from error
    except BaseException as error:  # also SystemExit: the pool decides what it means
        is_lost = leaves_out_of_step(error) or context.current().interrupted is not None
        return BROKEN if is_lost else FAILED, dumps(describe(error))
    finally:
        flush()


def leaves_out_of_step(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, left the ranks out of step."""
    errors = chain(error, with_contexts=True)
    return any(isinstance(each, CollectiveError) and not each.is_in_step for each in errors)
