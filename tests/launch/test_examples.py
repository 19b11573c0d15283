"""The example plug-ins, built and installed as their users would, keep the laws and run scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import JOB, UNISONO, run, started
from tests.support.processes import python
from tests.support.requirements import require

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
NEEDS = {"zmq": ("zmq",), "dask": ("distributed", "cryptography"), "batch": ()}
LIMIT_S = 300.0


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build wheels of all examples and unpack them; gives the variables that lead there."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if importlib.util.find_spec("hatchling") is not None:
        words.append("--no-build-isolation")  # the session has it
    paths = [str(PLUGINS / name) for name in NEEDS]
    words += ["--no-deps", "--target", str(folder), *paths]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    require("plugins", None if done.returncode == 0 else f"can't be built: {done.stderr}")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


@pytest.fixture
def here(request: pytest.FixtureRequest, installed: dict[str, str]) -> dict[str, str]:
    """The same, where the libraries that an example is over are here."""
    require("plugins", missing(request.param))
    return installed


def missing(name: str) -> str | None:
    absent = [each for each in NEEDS[name] if importlib.util.find_spec(each) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("here", [name], indirect=True)


@pytest.mark.parametrize(
    ("here", "words"),
    [("zmq", ["zmq", "-n", "3"]), ("batch", ["--environment", "batch"])],
    indirect=["here"],
)
def test_a_model_and_an_environment_keep_every_law(here: dict[str, str], words: list[str]) -> None:
    done = run([*UNISONO, "check", "--json", *words], **here)
    laws = json.loads(done.out)["laws"]
    assert laws
    assert [law for law in laws if law["status"] == "failed"] == [], done.err
    assert done.code == 0, done.err


@of("zmq")
def test_their_own_tests_are_collected(here: dict[str, str]) -> None:
    folders = [str(PLUGINS / name) for name in NEEDS if missing(name) is None]
    words = ["--collect-only", "-q", "--import-mode=importlib", "-c", "/dev/null", *folders]
    done = python("-m", "pytest", *words, env={**os.environ, **here})
    assert done.stdout.count("test_every_law_holds") >= len(folders), done.stdout + done.stderr


@of("dask")
def test_scripts_run_on_dask_under_unisono_run(here: dict[str, str]) -> None:
    """The one that ends well talks over ZeroMQ."""
    require("plugins", missing("zmq"))
    words = [*UNISONO, "run", "--launcher", "dask", "-n", "2"]
    done = run([*words, "--backend", "zmq", JOB, "facts"], **here)
    assert done.code == 0, done.err
    assert [fact["local_rank"] for fact in done.facts()] == [0, 1]
    assert [fact["model"] for fact in done.facts()] == ["zmq-dist"] * 2
    done = run([*words, JOB, "exit", "gloo"], **here)
    assert done.code == 7, done.err
    assert "error: rank 1 of 2" in done.err
    assert "\x1e" not in done.err


# Its own tests have all laws.
ON_DASK = """
from distributed import Client, LocalCluster, Security
import unisono
import unisono_dask
from unisono.errors import CollectiveTimeoutError, LaunchError
from unisono.testing import check_launcher

def lets_nobody_in():
    with unisono_dask._cluster(1, None) as client:
        place = client.scheduler.address
        for each in (place, *client.scheduler_info()["workers"]):
            assert each.startswith("tls://"), each
        for name, security in ((place.replace("tls", "tcp"), None), (place, Security.temporary())):
            try:
                Client(name, security=security, set_as_default=False, timeout=5)
            except OSError:
                print("refused")

def waits_no_longer():
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        options = {"scheduler": cluster.scheduler_address}
        for start_s, deadline_s in ((1.0, 100), (120.0, 1)):
            unisono_dask._START_S = start_s
            try:
                with unisono.deadline(deadline_s):
                    unisono.spawn("gloo", len, launcher="dask", launcher_options=options)
            except (CollectiveTimeoutError, LaunchError) as error:
                print(type(error).__name__, error)

if __name__ == "__main__":
    laws = ["results_come_in_the_order_of_ranks", "no_rank_is_left_behind"]
    print(*(outcome.status for outcome in check_launcher("dask", laws=laws)))
    lets_nobody_in()
    waits_no_longer()
"""


@of("dask")
def test_dask_keeps_laws_and_its_cluster_to_itself_and_waits_no_longer(
    here: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "on_dask.py").write_text(ON_DASK)
    done = run([sys.executable, str(tmp_path / "on_dask.py")], **here)
    assert done.code == 0, done.err
    laws, *refused, first, second = done.out.splitlines()
    assert laws == "passed passed", done.err
    assert refused == ["refused"] * 2, done.err
    assert first == "LaunchError 1 ranks need as many workers, and not all came in 1 s"
    assert second.startswith("CollectiveTimeoutError ")


IN_TASKS = """
import sys, unisono
for backend in ("gloo", "zmq"):
    unisono.initialize(backend)
    rank = unisono.get_rank()
    sys.stdout.write(f"{rank} {unisono.all_gather(rank)}\\n")  # in one piece
    unisono.finalize()
"""


@of("zmq")
def test_ranks_of_a_batch_system_find_each_other_and_hear_that_their_keys_can_be_read(
    here: dict[str, str],
) -> None:
    words = [sys.executable, "-c", IN_TASKS]
    for _ in range(3):  # again where their port went to somebody else meanwhile
        with socket.create_server(("127.0.0.1", 0)) as free:
            head = f"127.0.0.1:{free.getsockname()[1]}"
        env = {**here, "BATCH_TASKS": "2", "BATCH_HEAD": head}
        with (
            started(words, BATCH_TASK="0", **env) as one,
            started(words, BATCH_TASK="1", **env) as other,
        ):
            codes = [task.process.wait(100) for task in (one, other)]
            out, err = one.out() + other.out(), one.err() + other.err()
        if "EADDRINUSE" not in err and "in use" not in err:
            break
    assert codes == [0, 0], err
    assert sorted(out.splitlines()) == ["0 [0, 1]"] * 2 + ["1 [0, 1]"] * 2
    assert err.count("this job has no secret of its own") == 1, err


STRANGER = """
import faulthandler, sys, zmq
faulthandler.dump_traceback_later(80, exit=True)  # should it hang, this tells where
from zmq.utils.monitor import recv_monitor_message
context = zmq.Context()
for keys in (None, zmq.curve_keypair()):
    peer = context.socket(zmq.PUSH)
    peer.linger = 0
    if keys is not None:
        peer.curve_publickey, peer.curve_secretkey = keys
        peer.curve_serverkey = zmq.curve_keypair()[0]
    monitor = peer.get_monitor_socket()  # before it connects, else it may miss the refusal
    peer.connect(sys.argv[1])
    peer.send_multipart([(1 << 20).to_bytes(8, "little") + bytes(4), b"evil"])
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
    monitor.close(0)
    peer.close(0)
context.destroy(0)
print("refused twice")
"""
VICTIM = """
import subprocess, sys
import unisono as idist
from unisono.context import current_model

idist.initialize()
print("ranks", idist.model_name(), idist.all_gather(idist.get_rank()))
if idist.get_rank() == 0:
    where = current_model().inbox.last_endpoint.decode()
    words = [sys.executable, "-c", open(sys.argv[1]).read(), where]
    subprocess.run(words, check=True, timeout=100)
print("total", idist.all_reduce(idist.get_rank() + 1), len(current_model().early))
idist.finalize()
"""


@of("zmq")
def test_a_script_runs_on_zeromq_where_no_stranger_is_heard(
    here: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "victim.py").write_text(VICTIM)
    words = [*UNISONO, "run", "--backend", "zmq", "-n", "2"]
    done = run([*words, str(tmp_path / "victim.py"), str(tmp_path / "stranger.py")], **here)
    assert done.code == 0, done.err
    assert "refused twice" in done.out
    assert done.out.count("ranks zmq-dist [0, 1]\n") == 2, done.out
    assert done.out.count("total 3 0") == 2, done.out
