"""How many tests a session has, as `benchmarks/sessions.py` says."""

import os

VALUES = range(int(os.environ.get("SESSION_TESTS", "100")))
