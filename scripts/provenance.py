"""Where a measured figure comes from: machine, versions, date. Every table carries it."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path

from training_run import cuda_is_available, threads

PACKAGES = ("torch", "ve-fairseq", "fairseq-fixed", "sacrebleu")


def processor() -> str:
    """The name of the GPU or CPU that trains."""
    if cuda_is_available():
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> str:
    """Versions of Python and the packages that decide a result."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def provenance(command: str, data: str) -> str:
    """Markdown lines that say how a table was made."""
    used = os.environ.get("OMP_NUM_THREADS", str(threads()))
    return "\n".join(
        [
            f"- command: `{command}`",
            f"- data: {data}",
            f"- machine: {processor()}, {os.cpu_count()} cores, {used} threads; {versions()}",
            f"- date: {time.strftime('%Y-%m-%d')}",
        ]
    )


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])
