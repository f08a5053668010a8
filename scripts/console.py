"""What the scripts of this folder share: running a command, saying what is wrong in one sentence, writing
a folder whole or not at all."""

import argparse
import logging
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something the person at the keyboard can mend. The message is one sentence: what, and what to do."""


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """End the program with the sentence of a `UserError`, without a traceback; Ctrl-C likewise."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from here")


def readable(name: str) -> Path:
    """An argument that must name a file, for argparse."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {name}")
    return path


def shown(command: Sequence[str]) -> str:
    """The command as one line that can be pasted into a shell."""
    return shlex.join(str(word) for word in command)


def executable(name: str) -> str:
    """Path of a command that was installed beside this Python, e.g. `fairseq-train`, also when the virtual
    environment is not activated. Raises `UserError` where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise UserError(f"{name} is not installed for {sys.executable}; run: bash scripts/setup.sh")
    return found


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def announce(command: Sequence[str]) -> None:
    """Print a command before it runs."""
    print(f"$ {shown(command)}", flush=True)


def run(command: Sequence[str], output: Path, stdin: str | None = None) -> str:
    """Run a command with its output in the file `output`, and return that output.

    Raises `UserError` with the end of the output where the command fails.
    """
    with output.open("w") as log:
        done = subprocess.run(
            [executable(command[0]), *command[1:]],
            input=stdin,
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    check_exit(command, done.returncode, output)
    return output.read_text(errors="replace")


def check_exit(command: Sequence[str], returncode: int, output: Path) -> None:
    """Raise `UserError` with the end of `output` unless `returncode` is 0."""
    if returncode:
        raise UserError(
            f"{command[0]} ended with exit status {returncode}; its output is in {output} and ends:\n{tail(output)}"
        )


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that becomes `target` when the block ends well.

    An interrupted block leaves no `target`, so `target.exists()` means that it is complete.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what fairseq logs, and what Hydra and PyTorch warn it of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
