"""Sessions that set up all they need: ``python -m nox`` is the test command."""

from __future__ import annotations

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")


def install(session: nox.Session, *groups: str) -> None:
    """Install this project, the example plug-in and dependency groups, at the tested versions."""
    wanted = [item for group in groups for item in nox.project.dependency_groups(PYPROJECT, group)]
    session.install(*CONSTRAINTS, "-e", ".[demo]", *wanted)
    session.install("--no-deps", "./tests/plugin")


PYPROJECT = nox.project.load_toml("pyproject.toml")


@nox.session
def lint(session: nox.Session) -> None:
    session.install(*CONSTRAINTS, *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    install(session, "types")
    session.run("mypy")
    session.run("pyright", "--ignoreexternal", "--verifytypes", "unisono")


@nox.session
def tests(session: nox.Session) -> None:
    """Unit, process and conformance tests on serial, threads and gloo: ``nox -s tests -- ARGS``."""
    install(session, "test")
    session.run("pytest", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Every law on every model: ``nox -s conformance -- -k gloo``."""
    install(session, "test")
    session.run("pytest", "tests/conformance", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the distribution and use it in an environment that has nothing else of ours."""
    session.install("build")
    out = session.create_tmp()
    session.run("python", "-m", "build", "--outdir", out, silent=True)
    session.install(*CONSTRAINTS, "--find-links", out, "--force-reinstall", "--no-deps", "unisono")
    session.install(*CONSTRAINTS, "--find-links", out, "unisono[demo]")
    session.run("python", "-m", "unisono", "demo", "--no-compare", "--backend", "threads")


@nox.session
def bench(session: nox.Session) -> None:
    """What unisono costs over its peers, measured in the same run."""
    install(session, "bench")
    session.run("python", "benchmarks/imports.py")
    session.run("python", "benchmarks/dispatch.py")
