"""What tests share: the real fairseq commands, and a small data set made with them."""

import argparse
import fcntl
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "user_dir"
TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def command_line(*command: object) -> list[str]:
    """The command, looked up beside the Python that runs the tests."""
    name, *options = (str(word) for word in command)
    return [str(Path(sys.executable).parent / name), *options]


def command_environment() -> dict[str, str]:
    """The environment without traces of torchrun, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_command(*command: object, stdin: str = "", cwd: Path | None = None, fails: bool = False) -> str:
    """Run a command to its end and return what it printed, errors included; ``fails`` says that it must fail."""
    with subprocess.Popen(
        command_line(*command),
        stdin=subprocess.PIPE,
        cwd=cwd,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(stdin, timeout=180)
        except subprocess.TimeoutExpired:
            process.terminate()  # and not kill: torchrun then ends its workers, which hold the pipe open
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"{command[0]} did not end:\n{output[-6000:]}")
    assert (process.returncode != 0) == fails, f"{command[0]} returned {process.returncode}:\n{output[-6000:]}"
    return output


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Let the first process that comes here make ``directory``; the others, under pytest-xdist, wait and share it."""
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "made").exists():
            directory.mkdir(exist_ok=True)
            make(directory)
            (directory / "made").touch()
    return directory


def logged(output: str, tag: str) -> list[dict[str, float]]:
    """The numbers that fairseq logged as JSON under ``tag`` (train_inner, train, valid), in order."""
    lines = re.findall(rf"\b{tag}\b\S* (?:\| |- )(\{{.*\}})", output)
    return [{name: float(value) for name, value in json.loads(line).items() if value is not None} for line in lines]


def _write_reversals(prefix: Path, pairs: int, generator: random.Random) -> None:
    """Words of 3 to 8 letters, and the same words spelt backwards."""
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(3, 8))) for _ in range(pairs)]
    prefix.with_suffix(".src").write_text("".join(" ".join(word) + "\n" for word in words))
    prefix.with_suffix(".tgt").write_text("".join(" ".join(reversed(word)) + "\n" for word in words))


def _make_reversals(directory: Path) -> None:
    generator = random.Random(1)
    for split, pairs in (("train", 400), ("valid", 40), ("test", 40)):
        _write_reversals(directory / split, pairs, generator)
    run_command(
        *("fairseq-preprocess", "--source-lang", "src", "--target-lang", "tgt", "--joined-dictionary"),
        *("--trainpref", directory / "train", "--validpref", directory / "valid", "--testpref", directory / "test"),
        *("--destdir", directory / "binary"),
    )


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """``run_command``."""
    return run_command


@pytest.fixture(scope="session")
def command() -> Callable[..., list[str]]:
    """``command_line``, for tests that start processes themselves, in the environment of ``environment``."""
    return command_line


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """``command_environment``."""
    return command_environment()


@pytest.fixture(scope="session")
def once() -> Callable[..., Path]:
    """``made_once``."""
    return made_once


@pytest.fixture(scope="session")
def log_of() -> Callable[..., list[dict[str, float]]]:
    """``logged``."""
    return logged


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of this test session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def reversal_data(shared_directory: Path) -> Path:
    """A binarised data set of reversed words: 400 training, 40 validation and 40 test pairs."""
    return made_once(shared_directory / "reversals", _make_reversals) / "binary"


@pytest.fixture(scope="session")
def plugin() -> Path:
    """The plugin, imported into this process as ``--user-dir`` does it."""
    from fairseq import utils

    utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))
    return PLUGIN
