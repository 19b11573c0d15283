"""``python -m unisono``, the command line without a script on the PATH."""

from __future__ import annotations

from unisono.cli import main

if __name__ == "__main__":
    main()
