"""The site as it was built: ``nox -s docs`` says by UNISONO_SITE where that is."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import unisono

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


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


def test_a_search_for_barrier_finds_it(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    names = re.search(r'"docnames":\[(.*?)\]', index)
    found = re.search(r'"barrier":(\[[\d,]*\]|\d+)', index)
    assert names is not None
    assert found is not None
    documents = names[1].replace('"', "").split(",")
    at = {documents[int(number)] for number in re.findall(r"\d+", found[1])}
    assert {"docs/learn/collectives", "docs/reference/collectives"} <= at


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_browser_that_searches_for_barrier_shows_the_function_first(
    address: str, tmp_path: Path
) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    command = [browser, *_FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000"]
    command += ["--dump-dom", f"{address}/search.html?q=barrier"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    results = re.findall(r'<li[^>]*><a href="([^"]+)"', shown.partition('class="search"')[2])
    assert results
    assert results[0].endswith("docs/reference/collectives.html#unisono.barrier")
