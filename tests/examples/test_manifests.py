"""The manifests for Kubernetes: by the schemas of their kinds, and by the rules of their parts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.support.examples import EXAMPLES, JOBS, command_of, documents, job_of, pods_of
from tests.support.requirements import require

OLDEST = "1.31"  # of the versions of Kubernetes that a manifest is checked for


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        require("manifests", f"{name.partition('.')[0]} isn't installed")


def option(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


def test_there_are_no_others() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("kubernetes/*")) == sorted(JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_what_kubernetes_knows_is_right_by_its_schemas(name: str) -> None:
    validate = library("kubernetes_validate")
    known = [each for each in documents(name) if each["kind"] != "JobSet"]
    for version in (OLDEST, validate.latest_version()):
        for each in (*known, job_of(name)):
            validate.validate(each, version, strict=True)


def test_the_jobset_is_right_by_its_schema() -> None:
    models = library("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    (jobset,) = documents("jobset")
    made = models.JobsetV1alpha2JobSet.from_dict(jobset)
    network = made.to_dict()["spec"]["network"]
    assert network == jobset["spec"]["network"]  # a name that isn't known is left out
    for part in ("coordinator", "failurePolicy"):
        assert made.to_dict()["spec"][part] == jobset["spec"][part]


@pytest.mark.parametrize("name", JOBS)
def test_each_pod_is_a_node_of_the_job(name: str) -> None:
    spec = job_of(name)["spec"]
    template, count = pods_of(name)
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", count)
    assert template["spec"]["restartPolicy"] in ("Never", "OnFailure")  # Jobs take no other
    for index in range(count):
        words = command_of(template, index)
        assert words[:4] == ["python", "-m", "unisono", "run"]
        assert option(words, "nnodes") == str(count)
        assert option(words, "node-rank") == str(index)
        assert (EXAMPLES.parent / next(each for each in words if each.endswith(".py"))).exists()


def test_the_service_names_the_first_pod_of_the_job() -> None:
    service, job = documents("job")
    name = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    template, _ = pods_of("job")
    assert template["spec"]["subdomain"] == name
    first = f"{job['metadata']['name']}-0.{name}"
    assert option(command_of(template, 1), "master-addr") == first


def test_the_coordinator_is_the_first_pod_of_the_jobset() -> None:
    (jobset,) = documents("jobset")
    spec = jobset["spec"]
    (job,) = spec["replicatedJobs"]
    coordinator = {"replicatedJob": job["name"], "jobIndex": 0, "podIndex": 0}
    assert spec["coordinator"] == coordinator
    assert spec["network"]["enableDNSHostnames"] is True
    name = jobset["metadata"]["name"]  # also that of its service, as no subdomain is given
    first = f"{name}-{job['name']}-0-0.{name}"
    template, _ = pods_of("jobset")
    assert option(command_of(template, 1), "master-addr") == first
