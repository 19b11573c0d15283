"""The command line; each command is one module here and one line in `COMMANDS`."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

# Collections would take a fourth of the imports' time.
_COLLECTS = gc.isenabled()
gc.disable()

import typer  # noqa: E402
from typer.core import TyperCommand  # noqa: E402

import unisono  # noqa: E402
from unisono.errors import (  # noqa: E402
    ArgumentError,
    BackendError,
    UnisonoError,
    WorkerFailedError,
)

if _COLLECTS:
    gc.enable()

OF_RUN = "UNISONO_RUN_"
"""The start of the variables that give options of ``unisono run``."""

COMMANDS: dict[str, str] = {
    "bench": "Measure every collective on this machine.",
    "check": "Check every law on one backend, launcher or environment.",
    "demo": "Train a small net with several workers and with one, and compare.",
    "doctor": "Show the backends and launchers usable here, and this process's rank.",
    "run": "Run a script on several ranks: locally, or with torchrun, MPI, Slurm or Ray.",
    "top": "Show the ranks of your jobs that hang, their lines, and the ranks that wait.",
    "trace": "Join the traces of all ranks: one file for Perfetto, or a summary of the waits.",
    "where": "Print the stacks of all ranks of a job, and equal stacks only once.",
}
_HELP = {"help_option_names": ["-h", "--help"]}
_SETTINGS: dict[str, dict[str, Any]] = {
    # Arguments after the script's name belong to the script.
    "run": {
        "allow_interspersed_args": False,
        # torchrun accepts both spellings of its options
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
}
_EXAMPLES: dict[str, tuple[str, str]] = {  # of a command: a line to copy, and its page
    "bench": ("unisono bench --backend gloo -n 2", "reference/command-line.md"),
    "check": ("unisono check gloo -n 2", "how-to/write-a-model.md"),
    "demo": ("unisono demo -n 4", "learn/first-steps.md"),
    "doctor": ("unisono doctor --backend nccl", "how-to/multi-node.md"),
    "run": (
        f"unisono run -n 4 train.py --lr 0.1\nVariable: {OF_RUN}GRACE=60 sets --grace, and so on",
        "how-to/multi-node.md",
    ),
    "top": ("unisono top --job train.py", "how-to/find-a-hang.md"),
    "trace": ("unisono trace traces --summary", "how-to/slow-rank.md"),
    "where": ("unisono where train.py", "how-to/find-a-hang.md"),
}
# Variables in which shells pass the words typed so far, to complete them.
_TYPED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
_WRONG_USE = 2
_INTERRUPTED = 130


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"unisono {unisono.__version__}")
        raise typer.Exit


def _unisono(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Show the version and exit.", callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:  # fmt: skip
    # Called before every command, and alone if none is given.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(_WRONG_USE)


class _Command(TyperCommand):
    """A command whose help has its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            record = param.get_help_record(ctx)
            if record is not None:  # None for hidden options
                heading = getattr(param, "rich_help_panel", None) or default
                headings.setdefault(heading, []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _command_line(name: str) -> Any:
    """Build the parser; import only the command `name`, as some imports take seconds."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(
        invoke_without_command=True,
        help="One API for every way PyTorch goes distributed.",
        context_settings=_HELP,
    )(_unisono)
    for each, line in COMMANDS.items():
        function: Callable[..., int] = _unloaded
        if each == name:
            function = getattr(importlib.import_module(f"unisono.cli.{each}"), each)
        # Only the summary: the rest of a docstring is for readers of the code.
        text = (function.__doc__ or "").partition("\n\n")[0]
        example, page = _EXAMPLES[each]
        app.command(
            each,
            cls=_Command,
            help=text if each == name else line,
            short_help=line,
            epilog=f"\b\nExample:  {example}\nGuide:    docs/{page}",
            context_settings={**_HELP, **_SETTINGS.get(each, {})},
        )(function)
    group = typer.main.get_command(app)
    for param in group.commands["run"].params:  # type: ignore[attr-defined]
        if param.param_type_name == "option":
            long = max(param.opts, key=len).lstrip("-")
            param.envvar = OF_RUN + long.replace("-", "_").upper()
            param.show_envvar = False  # a variable after each of twenty options hides their help
    # --version also works after a command's name.
    version = copy.copy(next(option for option in group.params if option.name == "version"))
    version.expose_value = False  # so the commands' functions need no parameter for it
    for command in group.commands.values():  # type: ignore[attr-defined]
        command.params.append(version)
    return group


def _unloaded() -> int:
    raise AssertionError("a command that wasn't named on the command line was called")


def _named_in(args: Sequence[str]) -> str:
    """Return the command in the arguments, or in the words that a shell completes."""
    # The first word typed is the program's name.
    typed = " ".join(os.environ.get(name, "") for name in _TYPED).split()[1:]
    return next((word for word in (*args, *typed) if not word.startswith("-")), "")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and exit with its code."""
    # Wrong use and an unusable backend print one line on stderr, with exit code 2; a
    # worker's failure prints the worker's traceback, with exit code 1; Ctrl-C gives exit code 130.
    if args is None:  # this process is the command, which keeps what it has imported to its end
        gc.freeze()
    sys.exit(_exit_code(sys.argv[1:] if args is None else args))


def _exit_code(args: Sequence[str]) -> int:
    try:
        group = _command_line(_named_in(args))
        # In standalone mode click would print the errors itself, and exit with its own codes.
        code: Any = group(args=list(args), prog_name="unisono", standalone_mode=False)
    except (ArgumentError, BackendError) as error:
        return _complain(str(error), _WRONG_USE)
    except WorkerFailedError as error:
        return _complain(str(error).rstrip(), 1)  # its text is the worker's traceback
    except UnisonoError as error:
        return _complain(f"{type(error).__name__}: {error}", 1)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", _INTERRUPTED)
    except Exception as error:
        # Either click's errors or, in newer versions of typer, those of its copy of click: the two
        # have no public base class in common.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        text = f"{error.format_message().rstrip('.')}{_variable(error)} (see --help)"
        return _complain(text, error.exit_code)
    return code or 0


def _variable(error: Any) -> str:
    """Return a clause that names the variable that a wrong value is from, or nothing."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or param is None:
        return ""
    source = context.get_parameter_source(param.name)
    if source is None or source.name != "ENVIRONMENT":
        return ""
    return f"; the value is that of {param.envvar}"


def _complain(text: str, code: int) -> int:
    typer.echo(f"error: {text}", err=True)
    return code
