"""Each example on 1, 2 and 3 ranks: what it finds out doesn't depend on their number."""

from __future__ import annotations

import argparse
import doctest
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.command import UNISONO, run
from tests.support.examples import EXAMPLES, commands, load, numbers
from tests.support.pages import ROOT, blocks
from tests.support.programs import PYTHON, Printed, run_programs

SIZES = (1, 2, 3)
ROUNDING = 1e-4  # of float32, in the few epochs that there are here
Work = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def work() -> Iterator[Work]:
    """What runs a function on a number of ranks: here, or on workers that import things once."""
    for name in ("images", "forest", "sweep", "actors", "digits"):
        load(name)  # scikit-learn sets variables, and ranks begin with those that there are
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        pools = {size: stack.enter_context(unisono.WorkerPool("gloo", size)) for size in SIZES[1:]}
        for each in pools.values():
            each.run(abs)  # the check of what tests leave behind counts from here

        def run_on(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
            return pools[size].run(fn, *args) if size > 1 else [fn(0, *args)]

        yield run_on
    torch.set_num_threads(threads)


def options(epochs: int, checkpoint: Path | None = None, **more: bool) -> argparse.Namespace:
    chosen = {"seed": 0, "resume": False, "bfloat16": False, **more}
    return argparse.Namespace(epochs=epochs, checkpoint=checkpoint, **chosen)


def images(work: Work, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the example on `size` ranks, which all come to the same."""
    results: list[dict[str, Any]] = work(size, load("images").train, options)
    assert results == [results[0]] * size
    assert results[0]["world_size"] == size
    return results[0]


@pytest.fixture(scope="module")
def uninterrupted(work: Work, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three epochs of one rank, and the file that they leave."""
    path = tmp_path_factory.mktemp("images") / "images.pt"
    return {**images(work, 1, options(3, path)), "path": path}


@pytest.mark.parametrize("size", SIZES[1:])
def test_images_learns_the_same_on_any_number_of_ranks(
    work: Work, uninterrupted: dict[str, Any], size: int
) -> None:
    result = images(work, size, options(3))
    assert result["accuracy"] > 0.85
    assert result["accuracy"] == pytest.approx(uninterrupted["accuracy"], abs=2 / 357)
    assert result["checksum"] == pytest.approx(uninterrupted["checksum"], rel=ROUNDING)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_images_resumed_with_other_workers_is_as_if_uninterrupted(
    work: Work, uninterrupted: dict[str, Any], tmp_path: Path, before: int, after: int
) -> None:
    path = tmp_path / "images.pt"
    first = images(work, before, options(2, path))
    assert first["checksum"] != pytest.approx(uninterrupted["checksum"], rel=ROUNDING)
    result = images(work, after, options(3, path, resume=True))
    assert result["checksum"] == pytest.approx(uninterrupted["checksum"], rel=ROUNDING)
    assert result["accuracy"] == pytest.approx(uninterrupted["accuracy"], abs=2 / 357)
    assert unisono.load_checkpoint(path)["epoch"] == 3


@pytest.mark.parametrize("size", SIZES)
def test_images_evaluates_each_image_once(
    work: Work, uninterrupted: dict[str, Any], size: int
) -> None:
    path = uninterrupted["path"]
    model = load("images").make_model()
    model.load_state_dict(unisono.load_checkpoint(path)["model"])
    images_, labels = load("images").load()[1].tensors
    assert len(labels) % 2 == 1
    with torch.no_grad():
        right = int((model.eval()(images_).argmax(1) == labels).sum())
    result = images(work, size, options(3, path, resume=True))  # nothing is left to train
    assert result["accuracy"] == right / len(labels)


def test_images_in_mixed_precision(work: Work, uninterrupted: dict[str, Any]) -> None:
    result = images(work, 2, options(3, bfloat16=True))
    assert result["accuracy"] > 0.8
    assert result["checksum"] != uninterrupted["checksum"]


def test_forest_is_the_same_on_any_number_of_ranks(work: Work) -> None:
    for trees in (2, 20):  # 2: fewer than ranks
        results = [each for size in SIZES for each in work(size, load("forest").work, trees)]
        assert results == [results[0]] * sum(SIZES)
    assert results[0]["accuracy"] > 0.9


def test_sweep_is_the_same_on_any_number_of_workers() -> None:
    results = [load("sweep").sweep(size, 1, "gloo") for size in (1, 3)]  # by its command on 2
    for size, result in zip((1, 3), results, strict=True):
        assert result["accuracies"] == results[0]["accuracies"]
        assert result["best"] == results[0]["best"]
        assert result["final"] == pytest.approx([results[0]["final"][0]] * size, abs=2 / 360)
    assert results[0]["final"][0] > 0.85
    assert results[0]["final"][0] >= max(results[0]["accuracies"])


def test_actors_learn_the_same_on_any_number_of_ranks(work: Work) -> None:
    act = load("actors").work
    for rounds, episodes in ((2, 2), (15, 12)):  # 2 episodes: fewer than actors
        alone, *others = [each for size in SIZES for each in work(size, act, rounds, episodes, 0)]
        assert others == [pytest.approx(alone)] * (sum(SIZES) - 1)
    assert sum(alone[-3:]) / 3 > 2 * alone[0]


def test_digits_is_the_same_on_any_number_of_workers(work: Work) -> None:
    """Started by launchers, in tests/launch too."""
    module = load("digits")
    alone, *others = [
        each for size in SIZES for each in work(size, module.train, module.load(), 10, 0)
    ]
    assert alone["accuracy"] > 0.9
    assert len(others) == sum(SIZES[1:])
    for other in others:
        assert other["parameters"] == pytest.approx(alone["parameters"], abs=1e-5)
        assert other["checksums"] == pytest.approx(alone["checksums"] * other["world_size"])


def test_readme_names_every_example() -> None:
    said = (EXAMPLES / "README.md").read_text()
    files = [path for kind in ("py", "sbatch", "yaml") for path in EXAMPLES.glob(f"*/*.{kind}")]
    files = [path for path in files if path.parent.name != "testing"] + [*EXAMPLES.glob("*.py")]
    folders = [path.parent for path in EXAMPLES.glob("plugins/*/pyproject.toml")]
    names = [str(path.relative_to(EXAMPLES)) for path in (*files, *folders, EXAMPLES / "testing")]
    assert len(names) > 10
    assert [name for name in names if f"]({name})" not in said] == []
    programs = [name for name in names if name.endswith((".py", ".sbatch", ".yaml"))]
    assert [each for each in programs if f"examples/{each}" not in " ".join(commands())] == []


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What the README's commands print that begin ranks with a launcher, in one launch."""
    folder = tmp_path_factory.mktemp("commands")
    more = {"images": ["--epochs=1"], "forest": ["--trees=20"], "actors": ["--rounds=20"]}
    more["images, resumed"] = ["--epochs=2"]
    programs, launchers = {}, set()
    for command in commands():
        launcher, found, program = command.partition("examples/")
        if found and launcher.startswith("python -m unisono run") and program != "hang.py":
            launchers.add(launcher)
            name = program.partition(".py")[0] + ", resumed" * ("--resume" in program)
            programs[name] = [*shlex.split(f"{EXAMPLES}/{program}"), *more[name]]
    assert launchers == {f"python -m unisono run -n {size} " for size in SIZES[1:]}
    assert {*programs} == {*more}
    return run_programs((*PYTHON, "-m", "unisono", "run", "-n", "3"), programs, folder)


def test_programs_by_their_commands(printed: Printed) -> None:
    assert printed["images"].splitlines()[1] == "workers: 3"
    assert "epoch 1" not in printed["images, resumed"]
    assert printed["images, resumed"].count("accuracy") == 1  # rank 0 alone prints
    least = {"images, resumed": 0.8, "forest": 0.9, "actors": 40}
    for program, bound in least.items():
        name = "round 20" if program == "actors" else "accuracy"
        (found,) = numbers(printed[program], name)
        assert found > bound


def test_the_rank_that_hangs_is_named_as_the_first_pages_show() -> None:
    """Those are README and the index of the site."""
    name = "examples/hang.py"
    program = str(EXAMPLES / "hang.py")
    done = run([*UNISONO, "run", "-n", "2", program, "--deadline=1"])
    assert done.code == 1
    error = done.err[done.err.index("\nerror: ") + 1 :].replace(program, name)
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        (shown,) = (block.text for block in blocks(page) if name in block.text)
        command, _, expected = shown.partition("...\n")
        assert command == "$ python -m unisono run -n 2 examples/hang.py\n"
        assert doctest.OutputChecker().check_output(expected, error, doctest.ELLIPSIS), error


def test_sweep_by_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = [each for each in commands() if "sweep.py" in each]
    python, path, *options = shlex.split(command)
    assert python == "python"
    monkeypatch.setattr(sys, "argv", [path, *options, "--epochs=1"])
    runpy.run_path(str(EXAMPLES.parent / path), run_name="__main__")
    (found,) = numbers(capsys.readouterr().out, "all workers: accuracy")
    assert found > 0.8


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("images", "--epochs=zero", "invalid count value: 'zero'"),
        ("images", "--epochs=0", "invalid count value: '0'"),
        ("images", "--resume", "--resume needs --checkpoint PATH"),
        ("images", "--resume --checkpoint=none.pt", "error: there is no checkpoint none.pt"),
        ("images", "--backend=glo", "Did you mean 'gloo'?"),
        ("forest", "--trees=-1", "invalid count value: '-1'"),
        ("sweep", "--workers=0", "invalid count value: '0'"),
        ("sweep", "--backend=glo", "Did you mean 'gloo'?"),
        ("actors", "--rounds=", "invalid count value: ''"),
    ],
)
def test_wrong_input_is_refused(
    name: str,
    arguments: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split(" ")])
    with pytest.raises(SystemExit, match="2"):
        load(name).main()
    assert reason in capsys.readouterr().err
