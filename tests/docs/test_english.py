"""Phrases that readers stumbled over don't come back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.pages import PAGES, ROOT

# What isn't English, or not today's, and what to write instead.
BETTER = {
    r"(?<!\bthere )\b(is|are|was|were) no\b(?! more| longer| one\b)": "isn't a, aren't",
    r"\bwhoever\b": "a rank that, no matter who",
    r"\bshall\b": "should, or the present tense",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"(^|[.:!?\"] *|: )(?-i:Whom)\b": "the rank that",
    r"\bin the guise of\b": "emulated by",
    r"\bcan't travel\b": "can't be sent",
    r"\bisn't heard\b": "is ignored",
}
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in BETTER), re.IGNORECASE)


def _phrases(text: str) -> Iterator[str]:
    joined = re.sub(r"\s+(# )?", " ", text)
    for match in ANY.finditer(joined):
        yield repr(joined[max(0, match.start() - 40) : match.end() + 40])


def test_no_phrase_has_come_back() -> None:
    for path in (*PAGES, *(ROOT / "src").rglob("*.py")):
        found = list(_phrases(path.read_text()))
        assert not found, f"{path}: {found}, better one of {BETTER}"


@pytest.mark.parametrize(
    "text", ["it is no\n    # member", "Whoever asks", "a rank shall wait", '"""Whom it sees."""']
)
def test_a_phrase_is_seen(text: str) -> None:
    assert list(_phrases(text))


@pytest.mark.parametrize(
    "text", ["there is no store", "it is no longer there", "says whom it hears"]
)
def test_good_english_is_not(text: str) -> None:
    assert not list(_phrases(text))
