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

from tests.support.command import JOB, Done, run
from tests.support.requirements import require

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
NEEDS = {"zmq": ("zmq",), "dask": ("distributed", "cryptography"), "batch": ()}
LIMIT_S = 300.0
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
    variables = {**os.environ, **here}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
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


STRANGER_OF_DASK = """
from distributed import Client, Security
import unisono_dask

if __name__ == "__main__":
    with unisono_dask._cluster(1, None) as client:
        place = client.scheduler.address
        for each in (place, *client.scheduler_info()["workers"]):
            assert each.startswith("tls://"), each
        for name, security in ((place.replace("tls", "tcp"), None), (place, Security.temporary())):
            try:
                Client(name, security=security, set_as_default=False, timeout=5)
            except OSError:
                print("refused")
"""


@of("dask")
def test_strangers_cant_use_the_cluster_of_dask(here: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(STRANGER_OF_DASK)
    done = run([sys.executable, str(tmp_path / "stranger.py")], **here)
    assert done.code == 0, done.err
    assert done.out == "refused\nrefused\n", done.err


WITHOUT_WORKERS = """
import sys, time
from distributed import LocalCluster
import unisono
import unisono_dask
from unisono.errors import CollectiveTimeoutError, LaunchError

if __name__ == "__main__":
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        options = {"scheduler": cluster.scheduler_address}
        def start():
            unisono.spawn("gloo", len, launcher="dask", launcher_options=options)
        unisono_dask._START_S = 1.0
        try:
            start()
        except LaunchError as error:
            print(type(error).__name__, error)
        unisono_dask._START_S = 120.0
        try:
            with unisono.deadline(1):
                start()
        except LaunchError as error:
            print(type(error).__name__)
        except CollectiveTimeoutError as error:
            print(type(error).__name__)
"""


@of("dask")
def test_workers_of_dask_that_never_come_are_not_waited_for_for_ever(
    here: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "without.py").write_text(WITHOUT_WORKERS)
    done = run([sys.executable, str(tmp_path / "without.py")], **here)
    assert done.code == 0, done.err
    first, second = done.out.splitlines()
    assert first == "LaunchError 1 ranks need as many workers, and not all came in 1 s"
    assert second == "CollectiveTimeoutError"


@of("zmq")
def test_ranks_of_dask_talk_over_zeromq(here: dict[str, str]) -> None:
    words = [*UNISONO, "run", "--launcher", "dask", "--backend", "zmq", "-n", "2", JOB, "facts"]
    require("plugins", missing("dask"))
    done = run(words, **here)
    assert done.code == 0, done.err
    assert [fact["model"] for fact in done.facts()] == ["zmq-dist"] * 2


@of("batch")
def test_ranks_of_a_batch_system_find_each_other(here: dict[str, str]) -> None:
    code = (
        "import sys, unisono; unisono.initialize('gloo'); rank = unisono.get_rank(); "
        "sys.stdout.write(f'{rank} {unisono.all_gather(rank)}\\n')"  # in one piece
    )
    done = tasks(code, here)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["0 [0, 1]", "1 [0, 1]"]


@pytest.mark.parametrize("here", ["zmq"], indirect=True)
def test_a_job_without_a_secret_is_told_that_its_keys_can_be_read(here: dict[str, str]) -> None:
    code = (
        "import sys, unisono; unisono.initialize('zmq'); "
        "sys.stdout.write(f'{unisono.all_reduce(1)}\\n')"  # in one piece
    )
    done = tasks(code, here)
    assert done.code == 0, done.err
    assert done.out == "2\n2\n"
    assert done.err.count("this job has no secret of its own") == 1, done.err


def tasks(code: str, variables: dict[str, str]) -> Done:
    """Run two tasks of a batch system; again where their port went to somebody else meanwhile."""
    for _ in range(3):
        done = run([sys.executable, "-c", _TASKS.format(code=code)], **variables)
        if "EADDRINUSE" not in done.err and "in use" not in done.err:
            break
    return done


_TASKS = """
import os, socket, subprocess, sys, time
with socket.create_server(("127.0.0.1", 0)) as free:
    head = "127.0.0.1:%d" % free.getsockname()[1]
tasks, codes, limit = [], [], time.monotonic() + 100
try:
    for task in range(2):
        mine = dict(os.environ, BATCH_TASK=str(task), BATCH_TASKS="2", BATCH_HEAD=head)
        tasks.append(subprocess.Popen([sys.executable, "-c", {code!r}], env=mine))
    codes = [task.wait(max(0.0, limit - time.monotonic())) for task in tasks]
finally:
    for task in tasks:
        task.kill()
        task.wait()
sys.exit(max(map(abs, codes)))
"""

STRANGER = """
import sys, zmq
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

idist.initialize("zmq")
if idist.get_rank() == 0:
    where = current_model().inbox.last_endpoint.decode()
    words = [sys.executable, "-c", open(sys.argv[1]).read(), where]
    subprocess.run(words, check=True, timeout=100)
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
