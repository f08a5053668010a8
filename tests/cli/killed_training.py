"""fairseq-train that kills itself in the middle of a write.

``python killed_training.py save|copy|rename N options...``: at the N-th checkpoint that is saved, copied or renamed,
when half of it is written (before it is renamed).
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from fairseq_cli.train import cli_main


def die_at(owner: object, name: str, call: int, write_half) -> None:
    """Replace ``owner.name``: the ``call``-th time, run ``write_half`` with its arguments, then SIGKILL."""
    original, calls = getattr(owner, name), [0]

    def replacement(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            write_half(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def save_half(state: dict, file) -> None:
    file.write(b"half")
    file.flush()


def copy_half(source: str, target: str) -> None:
    content = Path(source).read_bytes()
    Path(target).write_bytes(content[: len(content) // 2])


if __name__ == "__main__":
    point, call = sys.argv[1], int(sys.argv[2])
    if point == "save":
        die_at(torch, "save", call, save_half)
    elif point == "copy":
        die_at(shutil, "copyfile", call, copy_half)
    else:
        die_at(os, "replace", call, lambda *paths: None)
    sys.argv = ["fairseq-train", *sys.argv[3:]]
    cli_main()
