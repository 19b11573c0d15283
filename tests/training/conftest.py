"""What torch itself leaves in the environment at the first step of an optimizer is no fault."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# torch sets it when it loads its compiler; the tests above compare the environment.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "inductor")))
