"""The reference has every public name, option, variable and error."""

from __future__ import annotations

import inspect
import re
import runpy
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import unisono
from tests.support.pages import ROOT
from unisono import arguments
from unisono.cli import COMMANDS, OF_RUN

REFERENCE = ROOT / "docs" / "reference"
_DIRECTIVE = re.compile(r"^\.\. (?:py:)?(auto\w+|data|currentmodule):: +(\S+)$", re.MULTILINE)
# The modules for users and for authors of plug-ins whose names are all public.
WHOLE = (
    "unisono",
    "unisono.compat.mmengine",
    "unisono.compat.torchmetrics",
    "unisono.compat.ignite_metrics",
    "unisono.errors",
    "unisono.launching",
    "unisono.options",
    "unisono.rendezvous",
    "unisono.testing",
)


def load(module: str) -> Any:
    """Import a module, whatever its library warns of; skip where that library isn't installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"what {module} is for isn't installed")


@cache
def described() -> frozenset[str]:
    """List what the pages describe, with the module that each is described in."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        module = ""
        for directive, name in _DIRECTIVE.findall(page.read_text()):
            if directive == "currentmodule":
                module = name
            else:
                found.add(f"{module}.{name}")
    return frozenset(found)


@pytest.mark.parametrize("module", WHOLE)
def test_every_public_name_is_described(module: str) -> None:
    public = {f"{module}.{name}" for name in load(module).__all__}
    public.discard("unisono.errors")  # a module: the page of errors has what is in it
    public.discard("unisono.UnisonoError")  # described where it is from
    assert public - described() == set()


def test_what_is_described_is_there_and_has_a_docstring() -> None:
    for path in described():
        module, _, name = path.rpartition(".")
        thing: Any = getattr(load(module), name)
        is_data = not (inspect.isclass(thing) or inspect.isroutine(thing))
        assert is_data or thing.__doc__, path


def test_every_name_of_ignite_is_described_or_said_to_be_the_facade_s() -> None:
    ignite = load("unisono.compat.ignite")
    text = (REFERENCE / "compat.md").read_text()
    section = text.partition("## unisono.compat.ignite\n")[2].partition("\n## ")[0]
    same = set(re.findall(r"`(\w+)`", section))
    for name in ignite.__all__:
        value = getattr(ignite, name)
        if f"unisono.compat.ignite.{name}" not in described():
            assert name in same, name
            assert isinstance(value, ModuleType) or value == getattr(unisono, name), name


def test_every_command_is_described() -> None:
    text = (REFERENCE / "command-line.md").read_text()
    assert re.findall(r"^\.\. command-line:: (\w+)$", text, re.MULTILINE) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described_with_its_default(command: str) -> None:
    """The site writes the page out of the parser; what that gives is here."""
    page = runpy.run_path(str(ROOT / "docs" / "extensions" / "command_line.py"))
    text = "\n".join(page["rendered"](command))
    parser, _ = page["_parser"](command)
    params = [each for each in parser.params if not getattr(each, "hidden", False)]
    for param in params:
        assert all(re.search(rf"^\.\. option:: .*{each}", text, re.M) for each in param.opts)
        if (
            param.param_type_name == "option"
            and not param.is_flag
            and param.default not in (None, "")
        ):
            assert f"default: {param.default}" in text, param.name
    shown = re.findall(r"^\.\. option:: .*\n\n   (.*)$", text, re.MULTILINE)
    assert len(shown) == len(params)
    assert all(shown), "an option without help"


def test_every_variable_is_described() -> None:
    sources = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = {name for text in sources for name in re.findall(r"\bUNISONO_[A-Z_]+\b", text)}
    text = (REFERENCE / "variables.md").read_text()
    rows = re.findall(r"^\| `(UNISONO_[A-Z_]+)` \| (.+) \|$", text, re.MULTILINE)
    assert {name for name, _ in rows} == read
    by_user = {name for name, _ in rows if name not in text.partition("## Set by unisono")[2]}
    assert {*arguments._VARIABLES, OF_RUN} == by_user
    assert len(rows) == len(read)


def test_every_page_of_the_reference_is_in_its_contents() -> None:
    index = (REFERENCE / "index.md").read_text()
    contents = index.partition("```{toctree}")[2].partition("```")[0].split()[1:]
    pages = {page.stem for page in REFERENCE.glob("*.md")} - {"index"}
    assert set(contents) == pages
