"""How long mimetic initialisation takes, against the book's one singular value decomposition a head.

    python scripts/benchmark_mimetic.py [--sizes 410x10x16 512x8x200 1024x16x24] [--decompositions 15]

A size is width x heads x layers. The whole model is initialised, queries, keys, values and outputs; decompositions of
matrices of the same width are timed before, between and after, and their median is multiplied by the number of heads.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from console import one_sentence_errors, shown
from provenance import markdown_table, provenance
from tqdm import tqdm


@dataclass(frozen=True)
class Size:
    """Width, heads and layers of a model."""

    width: int
    heads: int
    layers: int

    def __str__(self) -> str:
        return f"{self.width} / {self.layers} ({self.heads} heads)"


def parse_size(text: str) -> Size:
    """`512x8x200` as width, heads and layers, for argparse."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"'{text}' is no size; give width x heads x layers, as in 512x8x200")
    return Size(*map(int, numbers))


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(size: Size, decompositions: int) -> list[str]:
    """A row: what the initialisation takes, what a decomposition a head would take, and the ratio."""
    import torch
    from torch import nn

    from coldstart.mimetic import LANGUAGE, mimetic_

    layers = [nn.TransformerEncoderLayer(size.width, size.heads, 1) for _ in range(size.layers)]
    matrix = torch.randn(size.width, size.width) / size.width**0.5

    def decompose(count: int) -> list[float]:
        return [seconds(lambda: torch.linalg.svd(matrix)) for _ in range(count)]

    decompose(1), mimetic_(nn.ModuleList(layers[:1]), **LANGUAGE)  # the first calls prepare libraries
    svd, ours = decompose(decompositions // 3), 0.0
    for half in (layers[: size.layers // 2], layers[size.layers // 2 :]):
        ours += seconds(lambda half=half: mimetic_(nn.ModuleList(half), **LANGUAGE))
        svd += decompose(decompositions // 3)
    book = statistics.median(svd) * size.heads * size.layers
    return [str(size), f"{ours:.1f}", f"{book:.1f}", f"{ours / book:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of mimetic initialisation, against one SVD a head.")
    default = ["410x10x16", "512x8x200", "1024x16x24"]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=list(map(parse_size, default)), metavar="SIZE")
    parser.add_argument("--decompositions", type=int, default=15, help="timed for each size")
    args = parser.parse_args()
    with one_sentence_errors():
        rows = [measure(size, args.decompositions) for size in tqdm(args.sizes, unit=" sizes")]
        header = ["width / layers", "mimetic, s", "one SVD a head, s", "ratio"]
        print(markdown_table(header, rows))
        print(provenance(shown(["python", "scripts/benchmark_mimetic.py", *sys.argv[1:]]), "none"))


if __name__ == "__main__":
    main()
