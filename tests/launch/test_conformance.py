"""Every law on built-in launchers and environments; and broken ones are caught."""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import unisono
from tests.support.pages import ROOT, blocks
from tests.support.processes import until
from unisono import registry
from unisono.deadlines import require_time
from unisono.environments.detection import ENVIRONMENTS
from unisono.errors import EnvironmentDetectionError
from unisono.launchers.local import launch as processes
from unisono.rendezvous import host_store
from unisono.testing import (
    LAUNCHER_LAWS,
    EnvironmentConformance,
    LauncherConformance,
    check_environment,
    check_launcher,
    environments as environment_laws,
    launchers as launcher_laws,
)
from unisono.topology import LaunchPlan, RankInfo

pytestmark = pytest.mark.timeout(400)  # a law may take 120 s
GUIDE = ROOT / "docs" / "how-to" / "write-an-environment.md"


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the first deadline, as ranks of these launchers start soon; the second is kept."""
    monkeypatch.setattr(launcher_laws, "_DEADLINES_S", (2.0, launcher_laws._DEADLINES_S[1]))


class TestProcesses(LauncherConformance):
    launcher = "processes"
    sizes = (1, 3)


@pytest.mark.real
@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("law", LAUNCHER_LAWS)
def test_every_law_holds_on_ray(law: str) -> None:
    """Each with a Ray of its own, which the next one must not join."""
    (outcome,) = check_launcher("ray", laws=[law])
    assert outcome.status == "passed", outcome.reason


@pytest.mark.parametrize("environment", [each.NAME for each in ENVIRONMENTS])
def test_every_law_holds_in_environments(environment: str) -> None:
    outcomes = check_environment(environment)
    assert [o for o in outcomes if o.status != "passed"] == []


class TestOfAnEnvironment(EnvironmentConformance):
    environment = "torchrun"
    examples = ({"RANK": "1", "WORLD_SIZE": "2"},)


def launches(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., Any]) -> None:
    """Let the launcher of the name ``mine`` be this one."""
    for module in ("unisono.lifecycle", "unisono.registry", "unisono.testing.launchers"):
        monkeypatch.setattr(f"{module}.find_launcher", lambda name: launch)


# Launchers that are broken on purpose.


def names_no_rank(entry: Any, plan: Any, *, environ: Any = None) -> Any:
    try:
        return processes(entry, plan, environ=environ)
    except unisono.errors.WorkerFailedError as error:
        raise unisono.errors.LaunchError("a rank failed") from error


def changes_the_parent(entry: Any, plan: Any, *, environ: Any = None) -> Any:
    os.environ["UNISONO_TEST_LEFT"] = "1"
    return processes(entry, plan, environ=environ)


def pickles_abc_by_value(entry: Any, plan: Any, *, environ: Any = None) -> Any:
    cloudpickle.register_pickle_by_value(abc)
    try:
        return processes(entry, plan, environ=environ)
    finally:
        cloudpickle.unregister_pickle_by_value(abc)


@pytest.mark.parametrize(
    ("launch", "law"),
    [
        (pickles_abc_by_value, "classes_of_every_kind_arrive"),
        (lambda *job, **more: processes(*job, **more)[::-1], "results_come_in_the_order_of_ranks"),
        (lambda entry, plan, **_: processes(entry, plan), "each_rank_gets_its_facts_and_variables"),
        (names_no_rank, "the_first_failure_is_named_with_its_traceback"),
        (names_no_rank, "an_exit_code_or_a_signal_is_named"),
        (changes_the_parent, "the_parent_is_left_as_it_was"),
    ],
)
def test_a_broken_launcher_is_caught(
    launch: Callable[..., Any], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(monkeypatch, launch)
    monkeypatch.delenv("UNISONO_TEST_LEFT", raising=False)
    (outcome,) = check_launcher("mine", laws=[law])
    os.environ.pop("UNISONO_TEST_LEFT", None)
    assert outcome.status == "failed", outcome


def test_what_a_broken_launcher_leaves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where laws have their folders
    left = []

    def abandons(entry: Any, plan: Any, *, environ: Any = None) -> Any:
        def work() -> None:
            with contextlib.suppress(unisono.errors.WorkerFailedError):
                processes(entry, plan, environ=environ)

        left.append(threading.Thread(target=work, daemon=True))
        left[0].start()
        until(lambda: len([*tmp_path.glob("unisono-laws-*/rank-*")]) == 2, 90)
        raise unisono.errors.LaunchError("given up")

    launches(monkeypatch, abandons)
    (outcome,) = check_launcher("mine", laws=["no_rank_is_left_behind"])
    assert outcome.status == "failed"
    left[0].join(30)  # its ranks would sleep for ten minutes
    assert not left[0].is_alive()


ENDS = """
import sys, tempfile
from unisono import lifecycle, testing
from unisono.testing import launchers

def mine(entry, plan, *, environ=None):
    print("my cluster is gone", file=sys.stderr, flush=True)
    sys.exit(1)

lifecycle.find_launcher = launchers.find_launcher = lambda name: mine
tempfile.tempdir = sys.argv[1]
print(testing.check_launcher("mine", laws=["an_exit_code_or_a_signal_is_named"]))
"""


def test_what_a_launcher_printed_last_is_shown_where_it_would_end_the_process(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", ENDS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "SystemExit(1)" in done.stdout
    assert "my cluster is gone" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("law", ["a_deadline_is_kept", "an_interrupt_ends_all_ranks"])
def test_a_law_whose_ranks_never_come_is_not_counted_as_passed(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts_nothing(entry: Any, plan: Any, *, environ: Any = None) -> Any:
        while True:
            require_time(range(plan.world_size), plan.world_size)
            signal.sigtimedwait([], 0.05)

    launches(monkeypatch, starts_nothing)
    monkeypatch.setattr(launcher_laws, "_DEADLINES_S", (0.2, 0.2))
    monkeypatch.setattr(launcher_laws, "_START_S", 0.2)
    (outcome,) = check_launcher("mine", laws=[law], timeout_s=60.0)
    assert outcome.status == "unsupported", outcome
    assert "0 of 2 ranks" in outcome.reason


def test_a_law_that_hangs_fails_and_a_timer_that_ran_before_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches(monkeypatch, lambda *_, **__: threading.Event().wait(60))
    before = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        law = "each_rank_gets_its_facts_and_variables"
        (outcome,) = check_launcher("mine", laws=[law], timeout_s=0.5)
        assert 900.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert outcome.status == "failed"
    assert "it wasn't done after 0.5 s" in outcome.reason
    assert law in outcome.reason


# Environments that are broken on purpose.

WHOLE = {"MINE_RANK": "1", "MINE_SIZE": "2"}


def is_known(monkeypatch: pytest.MonkeyPatch, detect: Callable[..., Any], **more: object) -> None:
    """Let the environment of the name ``mine`` be this one."""
    mine = SimpleNamespace(**{"NAME": "mine", "detect": detect, "__module__": "types", **more})
    monkeypatch.setattr(environment_laws, "find_environment", lambda name: mine)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def whole(env: Mapping[str, str]) -> RankInfo | None:
    texts = {name: env.get(name, "").strip() for name in WHOLE}
    for name, text in texts.items():
        if not is_number(text) and any(texts.values()):
            what = f"mine environment: {name}={text!r}: set both of its variables, or none"
            raise EnvironmentDetectionError(what, "mine", name, text or None)
    return raises_value_error(texts) if all(texts.values()) else None


def guesses(env: Mapping[str, str]) -> RankInfo | None:
    found = int(env.get("MINE_RANK", "0") or 0)
    return RankInfo(found, 2, source="mine") if "MINE_SIZE" in env else None


def raises_value_error(env: Mapping[str, str]) -> RankInfo | None:
    if "MINE_RANK" not in env:
        return None
    return RankInfo(int(env["MINE_RANK"]), int(env["MINE_SIZE"]), source="mine")


def is_silent(env: Mapping[str, str]) -> RankInfo | None:
    try:
        return raises_value_error(env)
    except (KeyError, ValueError):
        return None


def expects_the_key(env: Mapping[str, str]) -> RankInfo | None:
    if not env.get("MINE_RANK", "").strip():
        return whole(env)
    try:
        size = int(env["MINE_SIZE"])
    except ValueError:
        size = -1
    return whole({**env, "MINE_SIZE": str(size)})


def takes_a_wrong_rank_for_no_job(env: Mapping[str, str]) -> RankInfo | None:
    text = env.get("MINE_RANK", "").strip()
    return None if text and not is_number(text) else whole(env)


@pytest.mark.parametrize(
    ("detect", "laws"),
    [
        (whole, ()),
        (guesses, ("a_partial_example_is_refused_by_name",)),
        (raises_value_error, ("a_malformed_variable_is_refused_by_name",)),
        (expects_the_key, ("a_partial_example_is_refused_by_name",)),
        (takes_a_wrong_rank_for_no_job, ("a_malformed_variable_is_refused_by_name",)),
        (is_silent, ("a_partial_example_is_refused_by_name",)),
        (lambda env: whole({**os.environ, **env}), ("it_reads_what_it_is_given_alone",)),
        (
            lambda env: whole({**WHOLE, **env}),
            ("no_variables_are_no_job", "variables_of_others_are_no_job"),
        ),
    ],
)
def test_a_broken_environment_is_caught(
    detect: Callable[..., Any], laws: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_known(monkeypatch, detect, EXAMPLES=(WHOLE,))
    failed = {o.law for o in check_environment("mine") if o.status == "failed"}
    assert set(laws) <= failed
    assert bool(failed) == bool(laws), failed


def test_an_environment_is_found_by_its_name_in_any_case_and_may_talk_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.find_environment("slurm").NAME == "slurm"
    with pytest.raises(unisono.errors.ArgumentError, match="unknown environment 'nope'.*slurm"):
        registry.find_environment("nope")
    (tmp_path / "talks.py").write_text("import sys\nprint('loaded', file=sys.stderr)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    is_known(monkeypatch, whole, EXAMPLES=(WHOLE,), __module__="talks")
    assert [o for o in check_environment("Mine") if o.status != "passed"] == []


def test_every_law_holds_in_the_environment_that_the_guide_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begins_the_guide.py").write_text(next(blocks(GUIDE)).text)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("begins_the_guide")
    monkeypatch.setattr(environment_laws, "find_environment", lambda name: module)
    assert [o for o in check_environment("batch") if o.status != "passed"] == []


def test_without_examples_laws_are_not_counted_as_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_known(monkeypatch, whole)
    statuses = {o.law: o.status for o in check_environment("mine")}
    assert statuses["a_partial_example_is_refused_by_name"] == "unsupported"
    assert "failed" not in statuses.values()
    assert set(statuses) == set(environment_laws.ENVIRONMENT_LAWS)


def test_a_hosted_plan_tells_ranks_where_they_meet() -> None:
    with host_store(LaunchPlan(2, job_id="7")) as plan:
        assert plan.store_is_hosted and plan.master_addr == "127.0.0.1"
        infos = [plan.info(local_rank) for local_rank in range(2)]
        assert [(info.rank, info.job_id) for info in infos] == [(0, "7"), (1, "7")]
        assert all(Path(str(info.private_store)).exists() for info in infos)
    assert not Path(str(infos[0].private_store)).exists()
    with host_store(LaunchPlan(2), address="127.0.0.1") as plan:
        assert plan.store_is_hosted and plan.private_store is None
