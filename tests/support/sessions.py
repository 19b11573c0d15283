"""Sessions of pytest that tests start, with unisono's plug-in."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PLUGIN = "unisono.testing.pytest_plugin.plugin"
ROOT = Path(__file__).parents[2]
WARMS_UP = """
import pytest

@pytest.mark.ranks(1, on="gloo")
def test_warms_up(world):
    pass
"""


class Sessions:
    """A separate interpreter in which sessions of pytest run one after the other.

    Args:
        variables: further environment variables of the interpreter.
        is_warm: whether it loads torch and starts the ranks' fork server before the first session.
    """

    def __init__(self, variables: Mapping[str, str] | None = None, *, is_warm: bool = True) -> None:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
        path = os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.sessions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**kept, "PYTHONPATH": path, **(variables or {})},
        )
        if is_warm:
            with tempfile.TemporaryDirectory() as folder:
                self.run(Path(folder), test_warms_up=WARMS_UP).assert_outcomes(passed=1)

    def run(
        self, folder: Path, *arguments: str, stdin: str = "", **modules: str
    ) -> pytest.RunResult:
        """Write modules into a folder, and run pytest there."""
        for name, text in modules.items():
            folder.joinpath(f"{name}.py").write_text(text)
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            streams = [Path(place, name) for name in ("stdin", "stdout", "stderr")]
            for path, text in zip(streams, (stdin, "", ""), strict=True):
                path.write_text(text)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            request = [str(folder), list(map(str, streams)), arguments]
            process.stdin.write(f"{json.dumps(request)}\n")
            process.stdin.flush()
            code = pytest.ExitCode(int(process.stdout.readline()))
            out, err = (path.read_text().splitlines() for path in streams[1:])
        sys.stdout.write("\n".join([*out, *err]))  # for the report of a test that fails
        return pytest.RunResult(code, out, err, time.monotonic() - begin)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _serve() -> None:
    with os.fdopen(os.dup(0)) as requests, os.fdopen(os.dup(1), "w", buffering=1) as replies:
        for request in requests:
            replies.write(f"{_session(*json.loads(request))}\n")


def _session(folder: str, streams: Sequence[str], arguments: Sequence[str]) -> int:
    for fd, name in enumerate(streams):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, fd)
        os.close(opened)
    environ, path = dict(os.environ), list(sys.path)
    is_loaded = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in environ and any(
        point.value == PLUGIN for point in entry_points(group="pytest11", name="unisono")
    )
    load = () if is_loaded else ("-p", PLUGIN)
    os.chdir(folder)
    try:
        with open(0, closefd=False) as sys.stdin:  # not what an earlier session read ahead
            return int(pytest.main([*load, "-p", "no:hypothesispytest", *arguments]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(ROOT)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
        if "pytest_timeout" in sys.modules:  # after --pdb it would never end a test again
            vars(sys.modules["pytest_timeout"])["SUPPRESS_TIMEOUT"] = False
        importlib.invalidate_caches()


if __name__ == "__main__":
    _serve()
