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


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [unisono.__version__]


def test_users_get_our_types() -> None:
    assert (Path(unisono.__file__).parent / "py.typed").exists()


def test_the_licence_is_whole() -> None:
    """It is the text of apache.org, byte for byte."""
    assert PROJECT["license"] == "Apache-2.0"
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_every_extra_is_tried() -> None:
    text = (ROOT / ".ci" / "package.py").read_text().partition("\nEXTRAS = {")[2].partition("\n}\n")[0]
    tried = re.findall(r'^    "(\w+)":', text, re.MULTILINE)
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


def test_a_release_moves_the_changelog(tmp_path: Path) -> None:
    changelog = tmp_path / "changelog.py"
    changelog.write_text((ROOT / "docs" / "changelog.py").read_text())
    (tmp_path / "changelog.d").mkdir()
    fragment = tmp_path / "changelog.d" / "1.added.first.md"
    for version, line in (("0.1.0", "- one"), ("0.2.0", "- two")):
        fragment.write_text(line + "\n")
        functions = runpy.run_path(str(changelog))
        functions["release"](version)
        assert not fragment.exists()
    assert re.sub(r", \d{4}-\d\d-\d\d", "", functions["render"]()) == (
        "# Changelog\n\nNot released yet.\n"
        "\n## 0.2.0\n\n### Added\n\n- two\n"
        "\n## 0.1.0\n\n### Added\n\n- one\n"
    )
