"""Make an environment of Python packages, or add to one.

    python .ci/environment.py FOLDER PYTHON CONSTRAINTS PACKAGE...

uv installs where every setting of pip can be given to it and it takes the build of torch that pip
would take; else pip does. What is installed is noted in FOLDER/installed.json: a change of the
constraints or of pyproject.toml installs again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

UV_FLAGS = {"find-links": "--find-links", "extra-index-url": "--extra-index-url"}
UV_NEEDS_NOT = {"constraint", "cert", "default-timeout", "disable-pip-version-check"}
AS_PIP = ("--index-strategy", "unsafe-best-match")  # the best version of all indexes


def main(folder: Path, python: str, constraints: str, *packages: str) -> None:
    done = folder / "installed.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions that run at once share environments
        facts = [python, Path("pyproject.toml").read_text(), constraints]
        project = sha256("\n".join(facts).encode()).hexdigest()
        known = json.loads(done.read_text()) if done.exists() else {}
        installed = known["packages"] if known.get("project") == project else []
        if set(packages) <= set(installed):
            return
        if not known:
            subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        (folder / "constraints.txt").write_text(constraints)
        install(folder, packages)
        done.write_text(json.dumps({"project": project, "packages": [*installed, *packages]}))


def install(folder: Path, packages: tuple[str, ...]) -> None:
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    file = folder / "constraints.txt"
    # In place of -c, which adds to what the machine holds back, as a newer torch.
    env = {**os.environ, "PIP_CONSTRAINT": str(file), "PIP_NO_COMPILE": "1"}
    flags = uv_flags(pip)
    if flags is not None:
        uv = (*pip[:2], "uv", "pip", "install", *flags, *AS_PIP, "-c", str(file), *packages)
        plan = subprocess.run([*uv, "--dry-run"], capture_output=True, text=True)
        torch = re.search(r"(?m)^ \+ torch==(\S+)", plan.stderr + plan.stdout)
        is_same = torch is None or torch[1] == torch_of_pip(pip, torch[1])
        if plan.returncode == 0 and is_same and subprocess.run([*uv, "--quiet"]).returncode == 0:
            return
    subprocess.run([*pip, "install", "--quiet", *packages], env=env, check=True)


def uv_flags(pip: tuple[str, ...]) -> list[str] | None:
    """Return pip's settings as options of uv; None where it has no such option, or can't be had."""
    settings = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    flags = []
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2]
        if name in UV_FLAGS:
            words = shlex.split(value)[0].split()
            flags += [part for word in words for part in (UV_FLAGS[name], word)]
        elif name not in UV_NEEDS_NOT:
            return None
    has_uv = subprocess.run([*pip, "install", "--quiet", "uv"]).returncode == 0
    return flags if has_uv else None


def torch_of_pip(pip: tuple[str, ...], version: str) -> str:
    """Return the build of a version that pip would take: 2.13.0+cpu before 2.13.0."""
    command = [*pip, "index", "versions", "torch"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"(?m)^Available versions: (.*)", listed)
    public = version.partition("+")[0]
    builds = found[1].split(", ") if found else []
    return max((each for each in builds if each.partition("+")[0] == public), default="")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
