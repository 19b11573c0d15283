"""The command line: a command is one module here and one line in `COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

import unisono
from unisono.cli.bench import bench
from unisono.cli.check import check
from unisono.cli.demo import demo
from unisono.cli.doctor import doctor
from unisono.cli.run import run
from unisono.errors import ArgumentError, BackendError, UnisonoError, WorkerFailedError

__all__ = ("COMMANDS", "app", "main")

COMMANDS: dict[str, Callable[..., int]] = {
    "bench": bench,
    "check": check,
    "demo": demo,
    "doctor": doctor,
    "run": run,
}
# What follows the script's name is the script's own.
_SETTINGS = {
    "run": {
        "allow_interspersed_args": False,
        # torchrun spells its options both ways
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
}
_WRONG_USE = 2
_INTERRUPTED = 130

app: typer.Typer = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
for _name, _command in COMMANDS.items():
    app.command(
        _name,
        help=(_command.__doc__ or "").partition("\n\n    Local.")[0],
        context_settings=_SETTINGS.get(_name),
    )(_command)


@app.callback(invoke_without_command=True, help="One API for every way PyTorch goes distributed.")
def _unisono(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"unisono {unisono.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(_WRONG_USE)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and exit with its code.

    Local. Wrong use and a backend that can't be used are one line on stderr and exit code 2; a
    worker's failure is its own traceback and exit code 1; Ctrl-C is exit code 130.

    Args:
        args: what follows the program's name; None for ``sys.argv[1:]``.

    Raises:
        SystemExit: always.
    """
    sys.exit(_exit_code(sys.argv[1:] if args is None else args))


def _exit_code(args: Sequence[str]) -> int:
    try:
        code: Any = app(args=list(args), prog_name="unisono", standalone_mode=False)
    except (ArgumentError, BackendError) as error:
        return _complain(str(error), _WRONG_USE)
    except WorkerFailedError as error:
        return _complain(str(error).rstrip(), 1)
    except UnisonoError as error:
        return _complain(f"{type(error).__name__}: {error}", 1)
    except typer.Abort:  # what typers that build on click make of Ctrl-C
        code = _INTERRUPTED
    except Exception as error:
        # Click's exceptions, or the same of a typer that carries its own: no common public base.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _complain(f"{error.format_message()} (see --help)", error.exit_code)
    return _complain("interrupted", _INTERRUPTED) if code == _INTERRUPTED else code or 0


def _complain(text: str, code: int) -> int:
    typer.echo(f"error: {text}", err=True)
    return code
