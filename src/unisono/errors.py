"""Every exception that unisono raises; docs/reference/errors.md has a drawing of them."""

from __future__ import annotations

from traceback import extract_tb

from unisono.tracebacks import fold, line_of, summary, where

__all__ = (
    "AlreadyInitializedError",
    "ArgumentError",
    "BackendError",
    "BackendUnavailableError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "EnvironmentDetectionError",
    "GroupMembershipError",
    "LaunchError",
    "NoReplicaError",
    "NotInitializedError",
    "PayloadError",
    "PeerFailedError",
    "PeerRefusedError",
    "RegistrationError",
    "UnisonoError",
    "UnknownBackendError",
    "UnsupportedOperation",
    "WorkerFailedError",
)

# Errors whose texts begin with another rank, which caused them.
_ABOUT_OTHERS = (
    "unisono.errors.CollectiveTimeoutError",
    "unisono.errors.CollectiveMismatchError",
)


class UnisonoError(Exception):
    """Base of every error that unisono raises."""


def _message(error: UnisonoError) -> str:
    """Return an error's text, without the further arguments, which only pickle needs."""
    # Not in the base class: other errors, also those of plug-ins, show all of their arguments.
    return str(error.args[0])


class ArgumentError(UnisonoError, ValueError, TypeError):
    """Raised when an argument has a wrong type, a wrong value or an unknown name.

    It is both a ValueError and a TypeError, because ignite.distributed (idist) raises one or the
    other.
    """


class BackendError(UnisonoError):
    """Base of the errors about finding and registering backends."""


class UnknownBackendError(BackendError, ValueError):
    """Raised when no model and no plug-in claims the backend's name."""


class BackendUnavailableError(BackendError, ImportError, ValueError):
    """Raised when a known backend can't be used here; contains the reason and the remedy.

    It is also a ValueError, because ignite.distributed (idist) raises one.
    """


class RegistrationError(BackendError, ValueError):
    """Raised when a model, launcher or environment can't be registered under its name."""


class ContextError(UnisonoError, RuntimeError):
    """Base of the errors about the active context."""


class AlreadyInitializedError(ContextError, ValueError):
    """Raised by `initialize` when a context is live already.

    It is also a ValueError, because torch raises one.
    """


class NotInitializedError(ContextError):
    """Raised when there is no live context where one is needed."""


class NoReplicaError(ContextError):
    """Raised when this process runs its replicas as threads and this thread isn't one of them."""


class GroupMembershipError(ContextError):
    """Raised when a group belongs to another context or lacks a rank that is needed."""


class EnvironmentDetectionError(UnisonoError, ValueError, RuntimeError):
    """Raised when the variables of a launcher are partial or inconsistent.

    It is both a ValueError and a RuntimeError, because ignite.distributed (idist) raises one or the
    other.

    Args:
        message: the fault and the remedy.
        source: the detected environment, such as ``"torchrun"``.
        variable: the variable at fault.
        value: its value, None if it is missing.
    """

    def __init__(
        self, message: str, source: str = "", variable: str = "", value: str | None = None
    ) -> None:
        super().__init__(message, source, variable, value)
        self.source = source
        self.variable = variable
        self.value = value

    __str__ = _message


class LaunchError(UnisonoError, RuntimeError):
    """Raised when replicas can't be started or their results can't be collected."""


class WorkerFailedError(LaunchError):
    """Raised in the parent when a replica failed; contains the first failure.

    Args:
        message: the whole text, ending with the replica's own traceback.
        rank: global rank of the replica that failed first.
        exit_code: its exit code, None if a signal ended it or it raised.
        signal: name of the signal that ended it, such as ``"SIGKILL"``.
        traceback: its traceback as text, empty if it left none.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        exit_code: int | None = None,
        signal: str | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message, rank, exit_code, signal, traceback)
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal
        self.traceback = traceback

    __str__ = _message

    @classmethod
    def of(cls, error: BaseException, rank: int, world_size: int) -> WorkerFailedError:
        """Build the error for an exception of a replica."""
        text = fold(error, error.__traceback__)
        message = cls.text(f"rank {rank} of {world_size}", summary(error), cls.line_of(error), text)
        failed = cls(message, rank, cls.exit_code_of(error), traceback=text)
        failed.__cause__ = error  # as `raise ... from` would, but the caller raises it
        return failed

    @staticmethod
    def text(who: str, summary: str, line: str, traceback: str) -> str:
        """Return the message: the exception and the user's line that raised it.

        If the exception names another rank as the cause, that rank comes first.
        """
        # `summary` has only the first line of the exception's text. If that line ends with a colon,
        # the list that follows is only in the traceback.
        summary = summary.removesuffix(":")
        kind, _, text = summary.partition(": ")
        if kind.startswith(_ABOUT_OTHERS) and text:
            raised = f"{who} raised {kind.rpartition('.')[2]}"
            head = f"{text}\n  {raised} {f'at {line}' if line else 'outside your own code'}"
        else:
            head = f"{who} raised {summary}" + (f"\n  at {line}" if line else "")
        return f"{head}\n\n{traceback}"

    @staticmethod
    def line_of(error: BaseException) -> str:
        """Return the line of the user's code that raised `error`, empty if there is none."""
        frame = where(extract_tb(error.__traceback__))
        return "" if frame is None else line_of(frame)

    @staticmethod
    def exit_code_of(error: BaseException) -> int | None:
        """Return the exit code of a SystemExit, None for any other exception."""
        if not isinstance(error, SystemExit):
            return None
        # The interpreter exits with 0 for None, and with 1 for an object that isn't an int.
        return error.code if isinstance(error.code, int) else int(error.code is not None)


class UnsupportedOperation(UnisonoError, NotImplementedError):
    """Raised when a model lacks an operation.

    Args:
        model: name of the model.
        what: the operation.
        instead: an alternative.
    """

    def __init__(self, model: str, what: str, instead: str) -> None:
        super().__init__(model, what, instead)
        self.model = model
        self.what = what
        self.instead = instead

    def __str__(self) -> str:
        return f"{self.model} has no {self.what}: {self.instead}"


class PayloadError(UnisonoError, TypeError):
    """Raised when a value can't be sent unchanged, or can't be sent by this collective."""


class CollectiveError(UnisonoError, RuntimeError):
    """Raised when a collective failed after it was started.

    ``is_in_step`` is true if all ranks raised the error and can continue with the next collective.
    """

    is_in_step = False


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Raised when ranks timed out; names the operation and the ranks if known."""


class CollectiveMismatchError(CollectiveError):
    """Raised when ranks called different collectives; lists each rank's call."""

    is_in_step = True


class PeerRefusedError(CollectiveError):
    """Raised when a process outside the job answered in place of a rank.

    Args:
        message: names the rank, and the process's user if known.
        rank: the rank that the process answered in place of, -1 if unknown.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message, rank)
        self.rank = rank

    __str__ = _message


class PeerFailedError(CollectiveError):
    """Raised when another rank, or a guarded section on it, failed.

    Args:
        message: names the rank and its failure.
        rank: the failed rank, -1 if unknown.
        traceback: its traceback as text, empty if there is none.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "") -> None:
        super().__init__(message, rank, traceback)
        self.rank = rank
        self.traceback = traceback

    __str__ = _message
