"""Training speed of `transformer_tfixup` against fairseq's `transformer` of the same size, in turn.

    python scripts/benchmark_speed.py [--recipe g2p] [--rounds 5] [--updates 20]

Both are trained in this process by fairseq's own trainer on the same batches: A B A B ..., so that whatever
else the machine does falls on both. The ratio is the median over rounds; above 1, T-Fixup is faster.
"""

import argparse
import logging
import os
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

from console import one_sentence_errors, shown
from provenance import markdown_table, provenance
from recipes import POST_LN, RECIPES, T_FIXUP, Recipe, Variant
from steps import prepare
from tqdm import tqdm
from training_run import cuda_is_available, threads


def build(recipe: Recipe, variant: Variant, count: int):
    """fairseq's trainer for a variant, made from the recipe's command, and at most `count` batches."""
    return build_from(recipe.train(Path("runs/benchmark"), variant, cpu=not cuda_is_available()), count)


def build_from(command: list[str], count: int):
    """fairseq's trainer, made from a `fairseq-train` command, and at most `count` batches."""
    trainer = trainer_of(command)
    iterator = trainer.get_train_iterator(epoch=1).next_epoch_itr(shuffle=True)
    trainer.begin_epoch(1)
    return trainer, list(islice(iterator, count))


def trainer_of(command: list[str]):
    """fairseq's trainer, made from a `fairseq-train` command, without its data."""
    from fairseq import options, tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    # The command itself names it as well, but mends of how options are read come too late then.
    utils.import_user_module(argparse.Namespace(user_dir="user_dir"))
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=command[1:])
    config = convert_namespace_to_omegaconf(args)
    utils.set_torch_seed(config.common.seed)
    task = tasks.setup_task(config.task)
    return Trainer(config, task, task.build_model(config.model), task.build_criterion(config.criterion))


def pass_seconds(trainer, batches: list[dict]) -> float:
    """Seconds of one pass over the batches, an update each."""
    start = time.perf_counter()
    for batch in batches:
        trainer.train_step([batch], raise_oom=True)
    if trainer.cuda:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - start


def tokens_per_second(trainer, batches: list[dict]) -> float:
    """Target tokens per second of one pass over the batches."""
    return sum(batch["ntokens"] for batch in batches) / pass_seconds(trainer, batches)


def benchmark(recipe: Recipe, rounds: int, updates: int) -> str:
    """Measure both variants in turn; return a Markdown table."""
    variants = (POST_LN, T_FIXUP)
    built = {variant: build(recipe, variant, updates) for variant in variants}
    speeds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for index in tqdm(range(rounds + 1), desc="rounds", unit=" rounds"):
        for variant in variants:
            speed = tokens_per_second(*built[variant])
            if index:  # the first round is a warm-up
                speeds[variant].append(speed)
    rows = [
        [variant.label.split(",")[0], f"{statistics.median(speeds[variant]):.0f}", f"{min(speeds[variant]):.0f}"]
        for variant in variants
    ]
    ratios = [cold / stock for stock, cold in zip(speeds[POST_LN], speeds[T_FIXUP], strict=True)]
    table = markdown_table(["architecture", "tokens/s, median", "slowest round"], rows)
    spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{table}\n\nT-Fixup / stock: {statistics.median(ratios):.3f} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description="T-Fixup's training speed against the stock Transformer's.")
    parser.add_argument("--recipe", choices=RECIPES, default="g2p", help="size and batches; default: g2p")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="updates of each architecture in a round")
    parser.add_argument("--source", type=Path, help="folder with Multi30k's .gz files, for no download")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads()))
    logging.disable(logging.WARNING)
    with one_sentence_errors():
        recipe = RECIPES[args.recipe]
        prepare(recipe, args.source)
        text = benchmark(recipe, args.rounds, args.updates)
        command = shown(["python", "scripts/benchmark_speed.py", *sys.argv[1:]])
        print(f"\n{text}\n\n{provenance(command, recipe.data.name)}")


if __name__ == "__main__":
    main()
