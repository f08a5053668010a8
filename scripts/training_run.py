"""One `fairseq-train` command, run with a progress bar, resumable, in a folder of its own."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from console import UserError, announce, check_exit, executable, shown
from tqdm import tqdm
from training_log import TrainingLog, read_log

MAX_THREADS = 4  # more only get into each other's way in models of this size


def threads() -> int:
    """Threads that PyTorch is given on the CPU, unless OMP_NUM_THREADS says otherwise."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MAX_THREADS)


def environment() -> dict[str, str]:
    """The environment of a training process."""
    return {"OMP_NUM_THREADS": str(threads()), **os.environ}


def cuda_is_available() -> bool:
    """Whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Hold a folder for one training at a time.

    The lock belongs to every process that inherits the open file, so a training that outlives its parent still
    holds it. Raises `UserError` when another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder} is in use by another run; wait for it to end, or end it") from None
        yield lock


def claim(run: Path, command: Sequence[str]) -> None:
    """Note the command of a run in its folder.

    Raises `UserError` where the folder was made by another one, whose checkpoints would not fit.
    """
    note = run / "command.txt"
    if note.exists() and note.read_text().strip() != shown(command):
        raise UserError(f"{run} was made by another command (see {note}); move it away or choose another folder")
    partial = note.with_suffix(".partial")
    partial.write_text(shown(command) + "\n")
    partial.replace(note)


class LogTail:
    """Follows a growing log file; `log` holds all that has been read."""

    def __init__(self, path: Path):
        self.path = path
        self.log = TrainingLog()
        self.position = 0

    def read(self) -> TrainingLog:
        """Take in the complete lines that have come since the last call."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self.position += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.log.add(line)
        return self.log


def train(command: Sequence[str], run: Path, updates: int, label: str = "training") -> TrainingLog:
    """Run a `fairseq-train` command that logs to `{run}/log.jsonl`, or go on with it, or do nothing when done.

    Args:
        command: the command and its options.
        run: folder of the run; also gets the command's output, `train.out`.
        updates: the command's `--max-update`, the length of the progress bar.
        label: stands before the progress bar.

    Raises:
        UserError: the command failed, or the folder belongs to another command or a run that is going on.
    """
    done = run / "trained"
    with locked(run) as lock:
        claim(run, command)
        announce(command)
        if not done.exists():
            process = start(command, run, lock)
            try:
                follow(process, run / "log.jsonl", updates, label)
            finally:
                end(process)
            check_exit(command, process.returncode, run / "train.out")
            done.touch()
    return read_log(run / "log.jsonl")


def start(command: Sequence[str], run: Path, lock: IO[str]) -> subprocess.Popen:
    """Start a training process that inherits the lock of its folder."""
    with (run / "train.out").open("a") as output:
        return subprocess.Popen(
            [executable(command[0]), *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[lock.fileno()],
        )


def follow(process: subprocess.Popen, log_file: Path, updates: int, label: str) -> None:
    """Show one progress bar over all updates until the process ends."""
    tail = LogTail(log_file)
    tail.read()
    pace = 0.5 if sys.stderr.isatty() else 30  # seconds between two pictures of the bar
    with tqdm(total=updates, desc=label, unit=" updates", initial=last_update(tail.log), mininterval=pace) as bar:
        running = True
        while running:
            running = process.poll() is None
            log = tail.read()
            bar.set_postfix_str(state(log), refresh=False)
            bar.update(max(0, last_update(log) - bar.n))
            if running:
                time.sleep(0.5)


def last_update(log: TrainingLog) -> int:
    """The number of the last update in a log."""
    return max([0, *log.train, *log.valid])


def state(log: TrainingLog) -> str:
    """Loss, validation loss and learning rate, as far as they are known."""
    parts = []
    for name, split in (("loss", "train"), ("valid", "valid")):
        _, losses = log.losses(split)
        if losses:
            parts.append(f"{name} {losses[-1]:.2f}")
    _, rates = log.curve("train", "lr")
    return ", ".join([*parts, *(f"lr {rate:.1e}" for rate in rates[-1:])])


def end(process: subprocess.Popen) -> None:
    """End a process that is still running, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait()


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program like Ctrl-C, so that a training it started does not go on alone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
