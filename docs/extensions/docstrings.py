"""Our docstrings as reStructuredText: shapes in brackets, names in single backticks, overloads.

The docstrings are written for ``help()``: a word in single backticks is a parameter or one of our
names, and ``[*shape]`` is a shape. Here both are code, and a name is a link where the reference has
it. Overloads (some functions have a dozen) are folded below the signature that covers them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import unisono

# Where a name that the facade lacks may be from; the reference has all of these.
_MODULES = ("unisono", "unisono.errors", "unisono.launching", "unisono.rendezvous")
_CODE = re.compile(r"(``.+?``)|`([^`\n]+)`|(\[[^\]\n`]*\*[^\]\n`]*\]|\[d0, \.\.\.\])")
_DOTTED = re.compile(r"unisono\.(errors|launching|rendezvous)\.\w+")
_RESULT = re.compile(r"^( *)(Returns|Yields):$")


def names_in(text: str, parameters: frozenset[str]) -> str:
    """Mark names and shapes in a line as reStructuredText does."""

    def replace(match: re.Match[str]) -> str:
        literal, name, shape = match.groups()
        if literal or shape:
            return literal or f"``{shape}``"
        target = _target(name) if name not in parameters else None
        return f":py:obj:`{name} <{target}>`" if target else f"``{name}``"

    return _CODE.sub(replace, text)


@functools.cache
def _target(name: str) -> str | None:
    root, _, rest = name.partition(".")
    for module in _MODULES:
        public = importlib.import_module(module).__all__
        if root in public and root != "errors":
            member = getattr(getattr(importlib.import_module(module), root), rest or root, None)
            is_shown = not rest or callable(member) or isinstance(member, property)
            return f"{module}.{name}" if is_shown else None
    return name if _DOTTED.fullmatch(name) else None


def convert(lines: list[str], parameters: frozenset[str]) -> list[str]:
    """Convert a docstring; what it returns is a sentence, whose colons say no type."""
    done: list[str] = []
    results: str | None = None  # the indentation of "Returns:" within it
    for line in lines:
        is_code = line.lstrip().startswith((">>>", "..."))
        heading = _RESULT.match(line)
        if heading:
            results = heading[1]
            done += ["", f"{results}:{heading[2].lower()}:"]
        elif results is not None and line.strip() and not line.startswith(results + " "):
            results = None
            done.append(line if is_code else names_in(line, parameters))
        else:
            done.append(line if is_code else names_in(line, parameters))
    return done


def _on_docstring(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    try:
        parameters = frozenset(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        parameters = frozenset()
    members = frozenset(dir(_owner(name))) if what in ("method", "attribute", "property") else ()
    lines[:] = convert(lines, parameters.union(members))
    if what == "attribute" and lines:
        lines[0] = f": {lines[0]}"  # else napoleon takes what is before a colon for a type
    shown = overloads(thing)
    if shown:
        lines += [
            "",
            ".. raw:: html",
            "",
            f"   <details class='overloads'><summary>{len(shown)} overloads, for type checkers",
            "   </summary>",
            "",
            ".. code-block:: python",
            "",
            *("   " + line for text in shown for line in text.splitlines()),
            "",
            ".. raw:: html",
            "",
            "   </details>",
            "",
        ]


def _on_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, result: Any
) -> tuple[str | None, Any] | None:
    """Leave out what a protocol adds to its classes, and types that Sphinx can't read."""
    if what == "class" and getattr(thing, "_is_protocol", False):
        return "", None
    if signature and "~typing.~P" in signature:  # *args: P.args, **kwargs: P.kwargs
        return signature.replace(": ~typing.~P", ""), result
    return None


def _owner(name: str) -> Any:
    """Give the class of a member, by the name under which a page shows it."""
    module, _, owner = name.rpartition(".")[0].rpartition(".")
    return getattr(importlib.import_module(module), owner, None)


def overloads(thing: Any) -> list[str]:
    """Give the source of a function's overloads, without their decorators."""
    function = inspect.unwrap(thing) if callable(thing) else None
    if not inspect.isfunction(function):
        return []
    return _overloads_of(function.__module__).get(function.__qualname__, [])


@functools.cache
def _overloads_of(module: str) -> dict[str, list[str]]:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not module.startswith("unisono"):
        return {}
    text = Path(file).read_text()
    found: dict[str, list[str]] = {}

    def visit(nodes: list[ast.stmt], within: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{within}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)]
                if "overload" in marks:
                    source = ast.get_source_segment(text, node, padded=True) or ""
                    found.setdefault(within + node.name, []).append(inspect.cleandoc(source))

    visit(ast.parse(text).body, "")
    return found


def _fold_overloads(app: Sphinx) -> None:
    """Make autodoc show one signature: `overloads` gives the others."""
    for name in unisono.__all__:
        getattr(unisono, name)
    analyze = ModuleAnalyzer.analyze

    def without(self: ModuleAnalyzer) -> None:
        analyze(self)
        if self.modname.startswith("unisono"):
            self.overloads = {}

    ModuleAnalyzer.analyze = without  # type: ignore[method-assign]


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to autodoc, before napoleon, which reads the sections."""
    app.connect("builder-inited", _fold_overloads)
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
