"""How much memory a measurement takes at its peak, in a process of its own: nothing from before is in the figure."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from console import UserError
from training_run import cuda_is_available, environment

# What is freed goes back to the system at once, so that the next peak is not hidden in what was kept of the last.
PROMPT_RETURN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS = Path("/proc/self/status")


def of_status(name: str) -> int:
    """Bytes in a line of the kernel's account of this process.

    Raises `UserError` on a system that keeps none.
    """
    if not STATUS.exists():
        raise UserError(f"memory is read from {STATUS}, which this system does not have; measure on Linux")
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name))


def held() -> int:
    """Bytes that this process holds now: tensors on the GPU where there is one, else everything."""
    if cuda_is_available():
        import torch

        return torch.cuda.memory_allocated()
    return of_status("VmRSS")


def peak() -> int:
    """The most bytes that this process has held, as :func:`held` counts them."""
    if cuda_is_available():
        import torch

        return torch.cuda.max_memory_allocated()
    return of_status("VmHWM")


def measured_alone(script: str, options: Sequence[str]) -> int:
    """The number that a Python script prints last, run in a process of its own.

    Raises `UserError` with the end of what it said where it fails.
    """
    done = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        env=environment() | PROMPT_RETURN,
        check=False,
    )
    if done.returncode:
        raise UserError(f"the measurement of memory failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])
