"""The example plug-ins, built and installed as their users would, keep the laws and run scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _command import JOB, Done, run

from _needs import require

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
NEEDS = {"zmq": "zmq", "dask": "distributed", "batch": None}
UNISONO = (sys.executable, "-m", "unisono")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build wheels of all examples and unpack them; gives the variables that lead there."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if importlib.util.find_spec("hatchling") is not None:
        words.append("--no-build-isolation")  # the session has it
    paths = [str(PLUGINS / name) for name in NEEDS]
    words += ["--no-deps", "--target", str(folder), *paths]
    done = subprocess.run(words, capture_output=True, text=True)
    require("plugins", None if done.returncode == 0 else f"can't be built: {done.stderr}")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


@pytest.fixture
def here(request: pytest.FixtureRequest, installed: dict[str, str]) -> dict[str, str]:
    """The same, where the library that an example is over is here."""
    library = NEEDS[request.param]
    is_here = library is None or importlib.util.find_spec(library) is not None
    require("plugins", None if is_here else f"{library} isn't installed")
    return installed


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("here", [name], indirect=True)


def failed(done: Done) -> list[dict[str, str]]:
    laws = json.loads(done.out)["laws"]
    assert laws
    return [law for law in laws if law["status"] == "failed"]


def check(words: Sequence[str], variables: dict[str, str]) -> None:
    done = run([*UNISONO, "check", "--json", *words], **variables)
    assert failed(done) == [], done.err
    assert done.code == 0, done.err


@of("zmq")
def test_the_model_over_zeromq_keeps_every_law(here: dict[str, str]) -> None:
    check(["zmq", "-n", "3"], here)


@of("dask")
@pytest.mark.parametrize("law", ["order_of_ranks", "left_behind"])  # its own tests have them all
def test_the_launcher_over_dask_keeps_laws(here: dict[str, str], law: str) -> None:
    check(["--launcher", "dask", "--law", law], here)


@of("batch")
def test_the_environment_keeps_every_law(here: dict[str, str]) -> None:
    check(["--environment", "batch"], here)


@pytest.mark.parametrize("here", ["batch", "dask", "zmq"], indirect=True)
def test_their_own_tests_are_collected(
    here: dict[str, str], request: pytest.FixtureRequest
) -> None:
    folder = PLUGINS / request.node.callspec.params["here"]
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", "/dev/null", str(folder)]
    done = subprocess.run(words, env={**os.environ, **here}, capture_output=True, text=True)
    assert "test_every_law_holds" in done.stdout, done.stdout + done.stderr


@of("zmq")
def test_a_script_runs_on_zeromq_under_unisono_run(here: dict[str, str]) -> None:
    done = run([*UNISONO, "run", "--backend", "zmq", "-n", "3", JOB, "facts"], **here)
    assert done.code == 0, done.err
    assert [fact["model"] for fact in done.facts()] == ["zmq-dist"] * 3
    assert [fact["ranks"] for fact in done.facts()] == [[0, 1, 2]] * 3


@of("dask")
def test_a_script_runs_on_dask_under_unisono_run(here: dict[str, str]) -> None:
    words = [*UNISONO, "run", "--launcher", "dask", "-n", "2", JOB]
    done = run([*words, "facts", "gloo"], **here)
    assert done.code == 0, done.err
    assert [fact["local_rank"] for fact in done.facts()] == [0, 1]
    done = run([*words, "exit", "gloo"], **here)
    assert done.code == 7, done.err
    assert "error: rank 1 of 2" in done.err
    assert "\x1e" not in done.err


@of("zmq")
def test_ranks_of_dask_talk_over_zeromq(here: dict[str, str]) -> None:
    words = [*UNISONO, "run", "--launcher", "dask", "--backend", "zmq", "-n", "2", JOB, "facts"]
    require("plugins", None if importlib.util.find_spec("distributed") else "no distributed")
    done = run(words, **here)
    assert done.code == 0, done.err
    assert [fact["model"] for fact in done.facts()] == ["zmq-dist"] * 2


@of("batch")
def test_ranks_of_a_batch_system_find_each_other(here: dict[str, str]) -> None:
    code = (
        "import unisono; unisono.initialize('gloo'); "
        "print(unisono.get_rank(), unisono.all_gather(unisono.get_rank()))"
    )
    done = run([sys.executable, "-c", _TASKS.format(code=code)], **here)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["0 [0, 1]", "1 [0, 1]"]


_TASKS = """
import os, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    head = "127.0.0.1:%d" % free.getsockname()[1]
tasks = [
    subprocess.Popen(
        [sys.executable, "-c", {code!r}],
        env=dict(os.environ, BATCH_TASK=str(task), BATCH_TASKS="2", BATCH_HEAD=head),
    )
    for task in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""

STRANGER = """
import sys, zmq
context = zmq.Context()
for keys in (None, zmq.curve_keypair()):
    peer = context.socket(zmq.PUSH)
    peer.linger = 0
    if keys is not None:
        peer.curve_publickey, peer.curve_secretkey = keys
        peer.curve_serverkey = zmq.curve_keypair()[0]
    peer.connect(sys.argv[1])
    peer.send_multipart([(1 << 20).to_bytes(8, "little") + bytes(4), b"evil"])
    monitor = peer.get_monitor_socket()
    from zmq.utils.monitor import recv_monitor_message
    refused = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
               zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    while monitor.poll(20000):
        event = recv_monitor_message(monitor)["event"]
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED, "a stranger was let in"
        if event in refused:
            break
    else:
        sys.exit("nobody refused")
    peer.disable_monitor()
print("refused twice")
"""
VICTIM = """
import subprocess, sys
import unisono as idist
from unisono._context import current_model

idist.initialize("zmq")
if idist.get_rank() == 0:
    where = current_model().inbox.last_endpoint.decode()
    subprocess.run([sys.executable, "-c", open(sys.argv[1]).read(), where], check=True)
print("total", idist.all_reduce(idist.get_rank() + 1), len(current_model().early))
idist.finalize()
"""


@of("zmq")
def test_a_stranger_is_not_heard_on_zeromq(here: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "victim.py").write_text(VICTIM)
    words = [*UNISONO, "run", "--backend", "zmq", "-n", "2"]
    done = run([*words, str(tmp_path / "victim.py"), str(tmp_path / "stranger.py")], **here)
    assert done.code == 0, done.err
    assert "refused twice" in done.out
    assert done.out.count("total 3 0") == 2, done.out
