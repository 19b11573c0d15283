"""Render docs/changelog.d/*.md into docs/changelog.md.

    python docs/changelog.py            write it
    python docs/changelog.py --check    say whether it is up to date, by the exit code

A fragment is named ``<issue>.<added|changed|fixed|removed>.md`` and has bullet lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "changelog.d"
PAGE = Path(__file__).parent / "changelog.md"
KINDS = ("added", "changed", "fixed", "removed")


def render() -> str:
    """Join the fragments, kind by kind and in the order of their numbers."""
    found: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in KINDS}
    for path in FOLDER.glob("*.md"):
        number, kind, *_ = path.name.split(".")
        if not number.isdecimal() or kind not in KINDS:
            sys.exit(f"{path}: a fragment's name is NUMBER.KIND.md, KIND one of {', '.join(KINDS)}")
        found[kind].append((int(number), path))
    lines = ["# Changelog", "", "Not released yet."]
    for kind, fragments in found.items():
        if fragments:
            lines += ["", f"## {kind.capitalize()}", ""]
            lines += [path.read_text().strip() for _, path in sorted(fragments)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it."""
    text = render()
    if "--check" in sys.argv[1:]:
        is_current = PAGE.exists() and PAGE.read_text() == text
        return 0 if is_current else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
