"""The programs of examples/, which tests run or call, and its manifests for Kubernetes."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = ("job", "jobset")
# Annotations that the controllers of Jobs and JobSets give each pod of a set named `images`.
ANNOTATIONS = {
    "batch.kubernetes.io/job-completion-index": "{index}",
    "jobset.sigs.k8s.io/coordinator": "images-workers-0-0.images",
}


@cache
def load(name: str) -> Any:
    """Import an example under a name that workers can't import, as they can't import `__main__`."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module


def commands() -> list[str]:
    """Return the commands of the README, in order."""
    text = (EXAMPLES / "README.md").read_text()
    return re.findall(r"\| `([^`]+)` \|$", text, re.MULTILINE)


def numbers(text: str, name: str) -> list[float]:
    """Return the numbers that an example printed after a name."""
    return [float(found) for found in re.findall(rf"{name}:? ([\d.]+)", text)]


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text()))


def job_of(name: str) -> dict[str, Any]:
    """Return the Job of a manifest, or the one that its JobSet creates."""
    last = documents(name)[-1]
    if last["kind"] == "Job":
        return last
    (job,) = last["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    names = {"name": f"{last['metadata']['name']}-{job['name']}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": names, **job["template"]}


def pods_of(name: str) -> tuple[dict[str, Any], int]:
    """Return the template of a manifest's pods, and their number."""
    spec = job_of(name)["spec"]
    return spec["template"], spec["completions"]


def command_of(template: dict[str, Any], index: int) -> list[str]:
    """Return the command of the pod with an index, with variables expanded as by Kubernetes."""
    (container,) = template["spec"]["containers"]
    variables = {}
    for variable in container["env"]:
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
        assert found, path
        variables[variable["name"]] = ANNOTATIONS[found[1]].format(index=index)

    def fill(word: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word)

    return [fill(word) for word in container["command"]]
