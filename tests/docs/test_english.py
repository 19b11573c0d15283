"""Phrases that readers stumbled over don't come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT

# What isn't English, or not today's, and what to write instead.
BETTER = {
    r"(?<!\bthere )\b(is|are|was|were) no\b(?! more| longer| one\b)": "isn't a, aren't",
    r"\bwhoever\b": "a rank that, no matter who",
    r"\bshall\b": "should, or the present tense",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"(^|[.:!?\"] *|: )Whom\b": "the rank that",
    r"\bin the guise of\b": "emulated by",
    r"\bcan't travel\b": "can't be sent",
    r"\bisn't heard\b": "is ignored",
}
# What was released is left as it was written.
TEXTS = [
    *(page for page in PAGES if page.name != "changelog.md"),
    *sorted((ROOT / "src").rglob("*.py")),
]


def _phrases(text: str) -> Iterator[str]:
    joined = re.sub(r"\s+(# )?", " ", text)
    for pattern, better in BETTER.items():
        for match in re.finditer(pattern, joined, re.IGNORECASE if "Whom" not in pattern else 0):
            around = joined[max(0, match.start() - 40) : match.end() + 40]
            yield f"{around!r}: better {better!r}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_has_come_back(text: Path) -> None:
    assert not list(_phrases(text.read_text()))


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
