"""Render docs/changelog.d/*.md into docs/changelog.md.

    python docs/changelog.py            write it
    python docs/changelog.py --check    say whether it is up to date, by the exit code
    python docs/changelog.py --release 0.1.0
                                        put what is there under that version, and begin again

A fragment is named ``<issue>.<added|changed|deprecated|fixed|removed>.<any word>.md`` and has
bullet lines. The word keeps several of one issue apart, and may be left out.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "changelog.d"
PAGE = Path(__file__).parent / "changelog.md"
RELEASED = Path(__file__).parent / "changelog.released.txt"  # the text of earlier versions
KINDS = ("added", "changed", "deprecated", "fixed", "removed")


def fragments() -> dict[str, list[Path]]:
    """Give the fragments, kind by kind and in the order of their numbers."""
    found: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in KINDS}
    for path in FOLDER.glob("*.md"):
        number, kind, *_ = path.name.split(".")
        if not number.isdecimal() or kind not in KINDS:
            sys.exit(f"{path}: a fragment's name is NUMBER.KIND.md, KIND one of {', '.join(KINDS)}")
        found[kind].append((int(number), path))
    return {kind: [path for _, path in sorted(each)] for kind, each in found.items()}


def render_fragments(level: str) -> list[str]:
    """Join the fragments under a heading for each kind."""
    lines = []
    for kind, paths in fragments().items():
        if paths:
            lines += ["", f"{level} {kind.capitalize()}", ""]
            lines += [path.read_text().strip() for path in paths]
    return lines


def render() -> str:
    """Give the whole page: what isn't released yet, then earlier versions."""
    lines = ["# Changelog", "", "Not released yet.", *render_fragments("##")]
    text = "\n".join(lines) + "\n"
    return text + RELEASED.read_text() if RELEASED.exists() else text


def release(version: str) -> None:
    """Move the fragments to the text of earlier versions."""
    heading = f"## {version}, {datetime.date.today():%Y-%m-%d}"
    text = "\n".join(["", heading, *render_fragments("###")]) + "\n"
    RELEASED.write_text(text + (RELEASED.read_text() if RELEASED.exists() else ""))
    for paths in fragments().values():
        for path in paths:
            path.unlink()


def main() -> int:
    """Write the page, or check it."""
    if sys.argv[1:2] == ["--release"]:
        release(sys.argv[2])
    text = render()
    is_current = PAGE.exists() and PAGE.read_text() == text
    if "--check" in sys.argv[1:]:
        return 0 if is_current else 1
    if not is_current:  # the session `package` may be reading it
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
