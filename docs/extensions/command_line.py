"""The reference of the command line, out of the parser itself: ``.. command-line:: run``.

`rendered` needs no Sphinx, so that a test can see that no option is missing.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from unisono.cli import COMMANDS, _command_line

__all__ = ("COMMANDS", "records_of", "rendered", "setup")

# Names in backticks, examples in quotes (not apostrophes), options, variables.
_CODE = re.compile(r"`([^`]+)`|(?<!\w)'([^']+)'(?!\w)|(--[a-z][\w-]*|\b[A-Z]+_[A-Z_]+\b)")
_DEFAULT = re.compile(r"\s*\[((?:default|env var): [^\]]*|required|[^\] ]*x[<>]=?[^\] ]*)\]")


def records_of(command: str) -> dict[str, str]:
    """Map each argument and option of a command, as its help spells it, to its help."""
    parser, context = _parser(command)
    found = (param.get_help_record(context) for param in parser.params)
    return {_plain(words): text for words, text in filter(None, found)}


def rendered(command: str) -> list[str]:
    """Write the reference of a command as lines of reStructuredText."""
    parser, context = _parser(command)
    usage = " ".join(parser.get_usage(context).removeprefix("Usage:").split())
    lines = [f".. program:: unisono {command}", "", ".. code-block:: text", "", f"   {usage}", ""]
    lines += [_escaped(line) for line in inspect.cleandoc(parser.help or "").splitlines()]
    lines.append("")
    for words, text in records_of(command).items():
        lines += [f".. option:: {words}", "", f"   {_escaped(text)}", ""]
    return lines


def _parser(command: str) -> tuple[Any, Any]:
    parser = _command_line(command).commands[command]
    name = f"unisono {command}"
    return parser, parser.make_context(name, [], resilient_parsing=True)


def _plain(words: str) -> str:
    """Leave out what typer calls Python's types; an argument needs none."""
    if not words.startswith("-"):
        return words.partition(" ")[0]
    return words.replace("<str>", "TEXT").replace("<int range>", "N")


def _escaped(text: str) -> str:
    """Mark code, so that its hyphens and quotes stay as they are; put defaults in parentheses."""
    text = _CODE.sub(lambda found: f"``{found[1] or found[2] or found[3]}``", text)
    return _DEFAULT.sub(r" (\1)", text.replace(" *", r" \*"))


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class CommandLine(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            command = self.arguments[0]
            holder = nodes.container()
            lines = StringList(rendered(command), source=f"unisono {command} --help")
            self.state.nested_parse(lines, self.content_offset, holder)
            return list(holder.children)

    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
