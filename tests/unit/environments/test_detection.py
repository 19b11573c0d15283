"""Who am I: recorded environments, bad variables, precedence, and text that nobody foresaw."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from unisono.environments import detection
from unisono.environments.detection import ENVIRONMENTS, Finding, detect, explain
from unisono.environments.ranks import port_of
from unisono.errors import EnvironmentDetectionError
from unisono.topology import RankInfo

FOLDER = Path(__file__).parents[2] / "data" / "environments"


def facts(info: RankInfo | None) -> str:
    """Write the facts as the second line of a dump does."""
    if info is None:
        return "no job"
    local_rank, local_world_size, node_rank, nnodes, address, port = (
        "?" if fact is None else fact
        for fact in (info.local_rank, info.local_world_size, info.node_rank, info.nnodes,
                     info.master_addr, info.master_port)
    )  # fmt: skip
    hosted = "hosted " if info.store_is_hosted else ""
    return (
        f"{info.source}, rank {info.rank} of {info.world_size}, local {local_rank} of "
        f"{local_world_size}, node {node_rank} of {nnodes}, {hosted}at {address}:{port}"
    )


def load(path: Path) -> tuple[str, Mapping[str, str]]:
    kind, says, *lines = path.read_text(encoding="utf-8").splitlines()
    assert kind.startswith(("# Recorded, ", "# Written from documentation, not recorded: "))
    env = dict(line.split("=", 1) for line in lines)
    return says.removeprefix("# Says: "), MappingProxyType(env)


def found(env: Mapping[str, str]) -> RankInfo:
    info = detect(env)
    assert info is not None
    return info


DUMPS = {path.stem: load(path) for path in sorted(FOLDER.glob("*.env"))}


@pytest.mark.parametrize("name", DUMPS)
def test_dump(name: str) -> None:
    says, env = DUMPS[name]
    if says.startswith("refused for "):
        with pytest.raises(EnvironmentDetectionError) as caught:
            detect(env)
        assert caught.value.variable == says.removeprefix("refused for ")
    else:
        assert facts(detect(env)) == says


@pytest.mark.parametrize("name", ["cray_alps_no_size.rank0", "pals_pmix.rank0"])
def test_size_that_nobody_says_can_be_given(name: str) -> None:
    _, env = DUMPS[name]
    with pytest.raises(EnvironmentDetectionError, match=r"PMI_SIZE=8"):
        detect(env)
    for variable in ("PMI_SIZE", "WORLD_SIZE"):
        info = found({**env, variable: "4"})
        assert (info.source, info.world_size) == (name.partition("_")[0], 4)


def test_jobs_at_the_same_time_have_ports_of_their_own() -> None:
    for one, other in (
        ("slurm_concurrent_step_n1", "slurm_concurrent_step_n2"),
        ("intelmpi.rank0", "intelmpi_again.rank0"),
    ):
        assert DUMPS[one][0].rpartition(":")[2] != DUMPS[other][0].rpartition(":")[2]
    near = {port_of(str(job), str(step)) for job in range(7000, 7090) for step in range(90)}
    assert len(near) == 90 * 90
    for job in ("4294967295", "prterun-host-12@1", "9" * 5000, "\ud800é"):
        assert 20000 <= port_of(job) <= 29472


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "c01", "MASTER_PORT": "29500"}
SRUN = dict(DUMPS["slurm_srun_3_1.rank0"][1])
NO_STEP = {"SLURM_STEP_ID": None, "SLURM_STEPID": None}
MPIRUN = dict(DUMPS["openmpi4.rank0"][1])
BAD: list[tuple[dict[str, str], dict[str, str | None], str, str | None]] = [
    (TORCH, {"RANK": None}, "RANK", None),
    (TORCH, {"WORLD_SIZE": None}, "WORLD_SIZE", None),
    (TORCH, {"RANK": " "}, "RANK", None),
    (TORCH, {"RANK": "4"}, "RANK", "4"),
    (TORCH, {"RANK": "-1"}, "RANK", "-1"),
    (TORCH, {"RANK": "abc"}, "RANK", "abc"),
    (TORCH, {"RANK": "\N{ARABIC-INDIC DIGIT ONE}"}, "RANK", "\N{ARABIC-INDIC DIGIT ONE}"),
    (TORCH, {"RANK": "1_0"}, "RANK", "1_0"),
    (TORCH, {"WORLD_SIZE": "0"}, "WORLD_SIZE", "0"),
    (TORCH, {"WORLD_SIZE": str(2**31)}, "WORLD_SIZE", str(2**31)),
    (TORCH, {"MASTER_PORT": "70000"}, "MASTER_PORT", "70000"),
    (TORCH, {"MASTER_PORT": "0"}, "MASTER_PORT", "0"),
    (TORCH, {"MASTER_ADDR": "two words"}, "MASTER_ADDR", "two words"),
    (TORCH, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK", "2"),
    (TORCH, {"LOCAL_RANK": "4"}, "LOCAL_RANK", "4"),
    (TORCH, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE", "5"),
    (TORCH, {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK", "2"),
    (TORCH, {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "NODE_RANK", "1"),
    (TORCH, {"GROUP_WORLD_SIZE": "5"}, "GROUP_WORLD_SIZE", "5"),
    (TORCH, {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE", "2"),
    (TORCH, {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE", "4"),
    (TORCH, {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": None}, "MASTER_ADDR", None),
    (SRUN, {"SLURM_PROCID": None}, "SLURM_PROCID", None),
    (SRUN, {"SLURM_PROCID": "4"}, "SLURM_PROCID", "4"),
    (SRUN, {"SLURM_LOCALID": "3"}, "SLURM_LOCALID", "3"),
    (SRUN, {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID", "x"),
    (SRUN, {"SLURM_PROCID": "1", **NO_STEP}, "SLURM_STEP_ID", None),
    (SRUN, {"SLURM_LOCALID": "1", **NO_STEP}, "SLURM_STEP_ID", None),
    (SRUN, {"SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE", "3,1"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "SLURM_STEP_TASKS_PER_NODE", "2(x2"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_TASKS_PER_NODE", "2(x3)"),
    (SRUN, {"SLURM_STEP_NODELIST": "n[1-2"}, "SLURM_STEP_NODELIST", "n[1-2"),
    (MPIRUN, {"OMPI_COMM_WORLD_RANK": None}, "OMPI_COMM_WORLD_RANK", None),
    (MPIRUN, {"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE", None),
    (MPIRUN, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ({"PMI_RANK": "0"}, {}, "PMI_SIZE", None),
    ({"JSM_NAMESPACE_RANK": "0"}, {}, "JSM_NAMESPACE_SIZE", None),
    ({"MV2_COMM_WORLD_SIZE": "2"}, {}, "MV2_COMM_WORLD_RANK", None),
]


@pytest.mark.parametrize(("base", "changes", "variable", "value"), BAD)
def test_bad_variable_is_named(
    base: dict[str, str], changes: dict[str, str | None], variable: str, value: str | None
) -> None:
    env = {name: text for name, text in {**base, **changes}.items() if text is not None}
    with pytest.raises(EnvironmentDetectionError) as caught:
        detect(env)
    error = caught.value
    assert (error.variable, error.value) == (variable, value)
    assert error.source in str(error)
    assert "unset" in str(error)
    assert variable in str(error)
    assert value is None or value in str(error)


@pytest.mark.parametrize(
    "env",
    [{}, {"MASTER_ADDR": "c01"}, {"MASTER_PORT": "1"}, {"LOCAL_RANK": "0"}, {"SLURM_JOB_ID": "7"},
     {"RANK": "", "WORLD_SIZE": ""}, {"LSB_JOBID": "1"}, {"PBS_JOBID": "1"}],
)  # fmt: skip
def test_no_environment(env: dict[str, str]) -> None:
    assert detect(env) is None
    assert {finding.verdict for finding in explain(env)} == {"absent"}


def test_address_and_port_from_the_user_come_first() -> None:
    for env in (SRUN, MPIRUN, DUMPS["mpich.rank0"][1]):
        info = found({**env, "MASTER_ADDR": "c01", "MASTER_PORT": "4711"})
        assert (info.master_addr, info.master_port) == ("c01", 4711)
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo(0, 1, source="torchrun")


def test_half_set_environment_gives_way_only_to_one_that_agrees() -> None:
    assert found({**SRUN, "WORLD_SIZE": "4"}).source == "slurm"
    for contradicting in ({"WORLD_SIZE": "8"}, {"RANK": "3"}):
        with pytest.raises(EnvironmentDetectionError, match=r"^torchrun "):
            detect({**SRUN, **contradicting})


def verdicts(findings: list[Finding[RankInfo]]) -> dict[str, str]:
    return {each.source: each.verdict for each in findings if each.verdict != "absent"}


def test_explain_names_the_winner_and_who_disagrees() -> None:
    inner = DUMPS["slurm_torchrun_2_1.rank1"][1]
    assert verdicts(explain(inner)) == {"torchrun": "won", "slurm": "disagrees"}
    beside = DUMPS["slurm_srun_pmi2.rank0"][1]
    assert verdicts(explain(beside)) == {"slurm": "won", "mpich": "agrees"}
    assert verdicts(explain(DUMPS["slurm_cray_shasta.rank1"][1])) == {"slurm": "won"}
    aprun_of_pals = {**DUMPS["pals_one_node.rank3"][1], "ALPS_APP_PE": "3"}
    assert verdicts(explain(aprun_of_pals)) == {"pals": "won"}
    findings = explain({**SRUN, "WORLD_SIZE": "8"})
    assert verdicts(findings) == {"torchrun": "refused", "slurm": "unused"}
    assert str(findings[0].error).startswith("torchrun environment: RANK is not set")
    assert findings[0].variables == (("WORLD_SIZE", "8"),)
    assert dict(findings[1].variables).items() <= SRUN.items()
    assert [each.source for each in findings] == [each.NAME for each in ENVIRONMENTS]


def plugin(answer: Callable[[Mapping[str, str]], Any]) -> Any:
    return SimpleNamespace(NAME="acme", detect=answer)


def test_plugins_come_last_and_their_faults_are_named() -> None:
    acme = plugin(lambda env: RankInfo(int(env["ACME"]), 9, source="acme"))
    assert detect({"ACME": "3"}, [acme]) == RankInfo(3, 9, source="acme")
    assert detect({"ACME": "3", **TORCH}, [acme]) == detect(TORCH)
    assert explain({"ACME": "3"}, [acme])[-1].variables == (("ACME", "3"),)
    for broken in (acme, plugin(lambda env: 3)):
        with pytest.raises(EnvironmentDetectionError, match=r"^acme environment: .*uninstall"):
            detect({}, [broken])
        assert explain({}, [broken])[-1].verdict == "refused"


@pytest.mark.parametrize(
    ("text", "first"),
    [("n1", "n1"), ("n[1-3,7]", "n1"), ("a-[01-03]-x", "a-01-x"), ("n1,n[3-5]", "n1"),
     ("r[0-1]n[08-10]", "r0n08"), ("n[9-11]", "n9"), ("n[000-2],m.example", "n000")],
)  # fmt: skip
def test_the_first_host_of_slurms_list_is_the_rendezvous(text: str, first: str) -> None:
    assert found({**SRUN, "SLURM_STEP_NODELIST": text}).master_addr == first


@pytest.mark.parametrize(
    "text",
    [",", "n[", "n[1", "n1]", "n[]", "n[1-]", "n[x]", "(null)", "n 1", "x" * 256,
     "n[1" + "9" * 300 + "]", "a" * 200_000 + "!"],
)  # fmt: skip
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentDetectionError, match=r"^slurm environment: SLURM_STEP_NODELIST"):
        detect({**SRUN, "SLURM_STEP_NODELIST": text})


# Those of the dumps, and every name in capitals that the sources quote.
SOURCES = sorted(Path(inspect.getfile(detection)).parent.glob("*.py"))
QUOTED = (re.findall(r'"([A-Z][A-Z0-9_]{3,})"', path.read_text()) for path in SOURCES)
NAMES = sorted({*chain(*QUOTED), *(name for _, env in DUMPS.values() for name in env)})
HOSTS = st.text("n0123456789[]-,.x", max_size=30)
TEXT = st.characters(exclude_categories=["Cs"])
ODD = ["", " ", "+1", "1_0", "٣", "1e3", "0x1", "²", "9" * 5000]
VALUES = st.one_of(
    *(st.text(TEXT, max_size=12), st.integers(-2, 9).map(str), HOSTS, st.sampled_from(ODD)),
    *(st.text("0123456789", max_size=99), st.text("n[]0123456789-,*()x ", max_size=20)),
    st.binary(max_size=12).map(lambda data: data.decode("utf-8", "surrogateescape")),
)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([{}, TORCH, SRUN, MPIRUN]),
    st.dictionaries(st.sampled_from(NAMES) | st.text(TEXT, max_size=5), VALUES, max_size=12),
)
def test_any_text_gives_facts_or_our_error(base: dict[str, str], noise: dict[str, str]) -> None:
    env = MappingProxyType({**base, **noise})
    findings = explain(env)
    assert len(findings) == len(ENVIRONMENTS)
    try:
        info = detect(env)
    except EnvironmentDetectionError as error:
        assert error.source
        assert error.variable in str(error)
        assert len(str(error)) < 1000
        return
    assert info in [each.info for each in findings if each.verdict == "won"] or info is None
    if info is not None:
        assert 0 <= info.rank < info.world_size < 2**31
        assert (info.local_rank or 0) < (info.local_world_size or info.world_size)
        assert (info.node_rank or 0) < (info.nnodes or info.world_size)
        assert 1 <= (info.master_port or 1) <= 65535


def test_nothing_is_read_but_the_mapping() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"os", "sys", "socket", "subprocess", "pathlib", "torch"} & set(names), path
