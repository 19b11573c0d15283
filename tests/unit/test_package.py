"""What is published says the same everywhere."""

from __future__ import annotations

import hashlib
import re
import runpy
import sys
from pathlib import Path

import pytest

import unisono
from tests.support.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # until Python 3.11
    tomllib = pytest.importorskip("tomli")

TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TABLE["project"]
README = (ROOT / "README.md").read_text()


def test_the_citation_and_the_changelog_have_the_version() -> None:
    citation, changes = (ROOT / "CITATION.cff"), (ROOT / "docs" / "facts" / "changelog.md")
    found = re.findall(r"^version: (.+)$", citation.read_text(), re.MULTILINE)
    found += re.findall(r"^## ([\d.]+)", changes.read_text(), re.MULTILINE)[:1]
    assert found == [unisono.__version__] * 2


def test_users_get_our_types() -> None:
    assert (Path(unisono.__file__).parent / "py.typed").exists()


def test_the_licence_is_whole() -> None:
    """It is the text of apache.org, byte for byte."""
    assert PROJECT["license"] == "Apache-2.0"
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_every_extra_is_tried() -> None:
    tried = runpy.run_path(str(ROOT / ".ci" / "package.py"))["EXTRAS"]
    assert sorted(tried) == sorted(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("name", ["bench", "docs"])
def test_users_get_what_we_use(name: str) -> None:
    """An extra can't include a group, nor the other way round."""
    groups = TABLE["dependency-groups"]
    ours = [
        package
        for item in groups[name]
        for package in (groups[item["include-group"]] if isinstance(item, dict) else [item])
    ]
    assert set(PROJECT["optional-dependencies"][name]) <= set(ours)


def test_the_badges_of_the_readme_say_what_is_so() -> None:
    said = re.findall(r"^!\[(.+)\]\(https://img.shields.io/badge/", README, re.MULTILINE)
    named = "Programming Language :: Python :: "
    found = [each for each in PROJECT["classifiers"] if each.startswith(f"{named}3.")]
    first, last = found[0].removeprefix(named), found[-1].removeprefix(named)
    (torch,) = [each for each in PROJECT["dependencies"] if each.startswith("torch>=")]
    assert said[:2] == [
        f"Python {first} to {last}",
        f"torch {torch.removeprefix('torch>=')} and later",
    ]
    assert said[-1] == PROJECT["license"]
    install = (ROOT / "docs" / "install.md").read_text()
    assert f"Python {first} to {last} and torch {torch.removeprefix('torch>=')} or later" in install


def test_install_has_every_extra() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert sorted(re.findall(r'`"\.\[(\w+)\]"`', text)) == sorted(PROJECT["optional-dependencies"])
