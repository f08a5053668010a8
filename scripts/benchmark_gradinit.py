"""What an iteration of GradInit costs, in time and memory, against a plain forward and backward pass.

    python scripts/benchmark_gradinit.py [--recipe g2p] [--max-tokens 2000] [--rounds 5] [--iterations 6]

The same stock Transformer, the same batches of the same size for all (S and S~ have as many tokens as a training
batch), in turn: plain, the branch where the constraint is satisfied, the branch where it is violated. Ratios are
medians over rounds. Memory is the peak of a fresh process each, less what it held before it built the model;
plain training there includes its Adam step.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmark_speed import build
from console import one_sentence_errors, shown
from memory import held, measured_alone, peak
from provenance import markdown_table, provenance
from recipes import POST_LN, RECIPES, Recipe, smoothed
from steps import prepare
from tqdm import tqdm
from training_run import cuda_is_available, threads

SATISFIED, VIOLATED = "constraint satisfied", "constraint violated"
GAMMA = {SATISFIED: 1e30, VIOLATED: 1e-30}  # no gradient norm is above the one or below the other
PLAIN = "plain forward and backward"


class Subject:
    """A model, its loss and its batches."""

    def __init__(self, recipe: Recipe, batches: int):
        import torch
        from fairseq import utils

        trainer, self.batches = build(recipe, POST_LN, batches)
        self.model, criterion = trainer.get_model(), trainer.get_criterion()
        if trainer.cuda:
            self.batches = [utils.move_to_cuda(batch) for batch in self.batches]
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6)

        def mean_loss(model, batch):
            loss, sample_size, _ = criterion(model, batch)
            return loss / sample_size

        self.mean_loss = mean_loss

    def plain(self, step: bool = False) -> Iterator[None]:
        """Forward and backward passes, one batch at a time; with Adam's step if asked."""
        self.model.train()
        for batch in self.batches:
            self.optimizer.zero_grad()
            self.mean_loss(self.model, batch).backward()
            if step:
                self.optimizer.step()
            yield

    def gradinit(self, branch: str, progress: Callable[[object], None]) -> None:
        """Iterations of one branch; the first of the violated branch is a wrong guess and costs a pass more."""
        import torch

        from coldstart.gradinit import gradinit

        self.optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        pairs = zip(self.batches, self.batches[1:] + self.batches[:1], strict=True)
        count = len(self.batches)
        gradinit(self.model, self.mean_loss, pairs, eta=1e-3, gamma=GAMMA[branch], lr=1e-3, iterations=count,
                 progress=progress)  # fmt: skip
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(value)


class Stopwatch:
    """Seconds between its calls."""

    def __init__(self):
        self.laps: list[float] = []
        self.last = time.perf_counter()

    def __call__(self, _=None) -> None:
        if cuda_is_available():
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps.append(now - self.last)
        self.last = now


def seconds(subject: Subject, what: str) -> float:
    """Mean seconds of a pass or an iteration, without the first."""
    watch = Stopwatch()
    if what == PLAIN:
        for _ in subject.plain():
            watch()
    else:
        subject.gradinit(what, watch)
    return statistics.mean(watch.laps[1:])


def peak_memory(recipe: Recipe, what: str) -> int:
    """Bytes that this process holds at its peak, more than before it builds the model."""
    import torch

    before = held()
    subject = Subject(recipe, 3)
    if cuda_is_available():
        torch.cuda.reset_peak_memory_stats()
    if what == PLAIN:
        for _ in subject.plain(step=True):
            pass
    else:
        subject.gradinit(what, lambda _: None)
    return peak() - before


def peak_memories(argv: list[str]) -> dict[str, int]:
    """Peak memory of plain training and of both branches, each in a process of its own."""
    return {what: measured_alone(__file__, [*argv, "--peak-memory-of", what]) for what in (PLAIN, SATISFIED, VIOLATED)}


def benchmark(recipe: Recipe, rounds: int, iterations: int, argv: list[str]) -> str:
    """Measure all three; return a Markdown table."""
    subject = Subject(recipe, iterations)
    kinds = (PLAIN, SATISFIED, VIOLATED)
    measured: dict[str, list[float]] = {what: [] for what in kinds}
    for _ in tqdm(range(rounds), desc="rounds", unit=" rounds"):
        for what in kinds:
            measured[what].append(seconds(subject, what))
    peaks = peak_memories(argv)
    rows = []
    for what in kinds:
        ratios = [mine / plain for mine, plain in zip(measured[what], measured[PLAIN], strict=True)]
        rows.append(
            [
                what,
                f"{statistics.median(measured[what]) * 1000:.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{peaks[what] / 2**20:.0f}",
                f"{peaks[what] / peaks[PLAIN]:.2f}",
            ]
        )
    header = ["iteration", "ms, median", "time / plain (rounds)", "peak memory, MiB", "memory / plain training"]
    tokens = statistics.mean(batch["ntokens"] for batch in subject.batches)
    size = f"{subject.parameters / 1e6:.2f} million parameters, {tokens:.0f} target tokens a batch on average"
    return f"{markdown_table(header, rows)}\n\n{size}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of GradInit's iterations against plain training's.")
    parser.add_argument("--recipe", choices=RECIPES, default="g2p", help="size and data; default: g2p")
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="passes or iterations of each kind in a round")
    parser.add_argument("--source", type=Path, help="folder with Multi30k's .gz files, for no download")
    parser.add_argument("--peak-memory-of", choices=(PLAIN, *GAMMA), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads()))
    logging.disable(logging.WARNING)
    with one_sentence_errors():
        recipe = RECIPES[args.recipe]
        recipe = replace(recipe, training=smoothed(dropout=0, max_tokens=args.max_tokens))
        if args.peak_memory_of:
            print(peak_memory(recipe, args.peak_memory_of))
            return
        prepare(recipe, args.source)
        text = benchmark(recipe, args.rounds, args.iterations, sys.argv[1:])
        command = shown(["python", "scripts/benchmark_gradinit.py", *sys.argv[1:]])
        print(f"\n{text}\n\n{provenance(command, recipe.data.name)}")


if __name__ == "__main__":
    main()
