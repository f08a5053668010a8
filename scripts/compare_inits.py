"""Four ways to start a Transformer, trained side by side by `fairseq-train`: Post-LN without and with warmup,
Pre-LN and T-Fixup without.

    python scripts/compare_inits.py depth --depths 18+18 6+6            the first updates, by depth (CMUdict)
    python scripts/compare_inits.py recipe multi30k_small               a whole recipe and its test score

Both write a Markdown table, and keep each finished run: interrupted, the same command goes on.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from console import UserError, one_sentence_errors, shown
from provenance import markdown_table, provenance
from recipes import G2P, RECIPES, VARIANTS, Recipe, Variant, model_options
from steps import Result, prepare, train_and_score
from training_log import TrainingLog
from training_run import cuda_is_available, exit_on_sigterm, train

LAST_UPDATES = 10
DIVERGED = "gradients are Nan/Inf"  # how fairseq says that a training overflowed
VARIANTS_BY_NAME = {variant.name: variant for variant in VARIANTS}


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """`mean ± standard deviation` over seeds; the mean alone of one value; `diverged` of none."""
    if not values:
        return "diverged"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def last_loss(log: TrainingLog) -> float:
    """Mean training loss over the last updates of a run (base 2)."""
    updates, losses = log.losses("train")
    points = zip(updates, losses, strict=True)
    return statistics.mean([loss for update, loss in points if update > updates[-1] - LAST_UPDATES])


def first_loss(log: TrainingLog) -> float:
    """Training loss of the first update (base 2)."""
    return log.losses("train")[1][0]


def largest_gradient(log: TrainingLog) -> float:
    """Largest gradient norm of a run."""
    return max(log.curve("train", "gnorm")[1])


def parse_depth(text: str) -> tuple[int, int]:
    """`18+18` as the numbers of encoder and decoder layers, for argparse."""
    encoder, plus, decoder = text.partition("+")
    if not (plus and encoder.isdecimal() and decoder.isdecimal() and int(encoder) > 0 and int(decoder) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no depth; give encoder+decoder layers, as in 18+18")
    return int(encoder), int(decoder)


def depth_recipe(args: argparse.Namespace, depth: tuple[int, int]) -> Recipe:
    """The recipe of a short run at one depth: no checkpoints, no dropout, no label smoothing, every update logged."""
    return replace(
        G2P,
        data=args.data,
        model=(*model_options(args.embed_dim, args.ffn_embed_dim, args.heads, *depth), *G2P.model[-1:]),
        lr=args.lr,
        decay_period=args.decay_period,
        warmup_updates=args.warmup_updates,
        updates=args.updates,
        save_every=0,
        log_every=1,
        training=("--criterion=cross_entropy", "--dropout=0", f"--max-tokens={args.max_tokens}", "--num-workers=0"),
    )


def short_run(recipe: Recipe, variant: Variant, folder: Path, label: str) -> TrainingLog | None:
    """Train one point, or None where the training overflowed."""
    overflowed = folder / "diverged"
    if overflowed.exists():
        return None
    try:
        command = recipe.train(folder, variant, cpu=not cuda_is_available())
        return train(command, folder, recipe.updates, label)
    except UserError:
        if DIVERGED not in (folder / "train.out").read_text(errors="replace"):
            raise
        overflowed.touch()
        return None


def depth_row(recipe: Recipe, variant: Variant, folder: Path, seeds: Sequence[int], label: str) -> list[str]:
    """Train one variant with every seed and make its row of the table."""
    logs = []
    for seed in seeds:
        name = f"{variant.name}-seed{seed}"
        logs.append(short_run(replace(recipe, seed=seed), variant, folder / name, f"{label} {name}"))
    sound = [log for log in logs if log is not None]
    columns = [[column(log) for log in sound] for column in (first_loss, last_loss, largest_gradient)]
    return [variant.label, *map(mean_and_spread, columns), f"{len(logs) - len(sound)} of {len(logs)}"]


def compare_depths(args: argparse.Namespace) -> str:
    """Run every depth, variant and seed; return the tables as Markdown."""
    prepare(replace(G2P, data=args.data))
    header = ["start", "first loss", f"loss, last {LAST_UPDATES} updates", "largest gradient norm", "overflowed"]
    tables = []
    for depth in args.depths:
        label = f"{depth[0]}+{depth[1]}"
        recipe = depth_recipe(args, depth)
        folder = args.out / f"{label}-width{args.embed_dim}-updates{args.updates}"
        rows = [depth_row(recipe, VARIANTS_BY_NAME[name], folder, args.seeds, label) for name in args.variants]
        tables.append(f"### {label} layers, {args.updates} updates\n\n{markdown_table(header, rows)}")
    return "\n\n".join(tables)


def recipe_row(recipe: Recipe, variant: Variant, folder: Path, seeds: Sequence[int]) -> list[str]:
    """Train one variant to the end with every seed, score it, and make its row of the table."""
    results: list[Result] = []
    for seed in seeds:
        run = folder / f"{variant.name}-seed{seed}"
        results.append(train_and_score(replace(recipe, seed=seed), variant, run, cpu=not cuda_is_available()))
        print(f"{variant.label}, seed {seed}: {results[-1].score}", flush=True)
    return [
        variant.label,
        recipe.lr,
        mean_and_spread([last_loss(result.log) for result in results]),
        mean_and_spread([min(result.log.losses("valid")[1]) for result in results]),
        mean_and_spread([result.score.value for result in results], digits=1),
        mean_and_spread([result.train_seconds / 60 for result in results], digits=1),
    ]


def compare_recipe(args: argparse.Namespace) -> str:
    """Train a whole recipe with every variant, learning rate and seed; return the table as Markdown."""
    recipe = RECIPES[args.recipe].shortened(args.updates)
    prepare(recipe, args.source)
    score = "BLEU" if recipe.task == "translation" else "phone error rate, %"
    header = ["start", "learning rate", "training loss", "validation loss", score, "minutes"]
    rows = [
        recipe_row(replace(recipe, lr=lr), VARIANTS_BY_NAME[name], args.out / recipe.name / f"lr{lr}", args.seeds)
        for name in args.variants
        for lr in args.lrs or [recipe.lr]
    ]
    return f"### {recipe.name}, {recipe.updates} updates\n\n{markdown_table(header, rows)}"


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of both comparisons."""
    names = list(VARIANTS_BY_NAME)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_inits"), help="folder for runs and tables")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Post-LN, Pre-LN and T-Fixup side by side.")
    commands = parser.add_subparsers(dest="command", required=True)
    depth = commands.add_parser("depth", help="the first updates at several depths, on CMUdict")
    depth.add_argument("--depths", nargs="+", type=parse_depth, default=[(18, 18), (6, 6)], metavar="ENC+DEC")
    depth.add_argument("--embed-dim", type=int, default=64)
    depth.add_argument("--ffn-embed-dim", type=int, default=128)
    depth.add_argument("--heads", type=int, default=4)
    depth.add_argument("--max-tokens", type=int, default=2048, help="tokens a batch")
    depth.add_argument("--updates", type=int, default=150)
    depth.add_argument("--lr", default="1e-3")
    depth.add_argument("--decay-period", type=int, default=4000, help="without warmup; 0: constant rate")
    depth.add_argument("--warmup-updates", type=int, default=100, help="of the variant with warmup")
    depth.add_argument("--data", type=Path, default=G2P.data)
    depth.set_defaults(compare=compare_depths)
    recipe = commands.add_parser("recipe", help="a whole recipe, to the test score")
    recipe.add_argument("recipe", choices=RECIPES)
    recipe.add_argument("--updates", type=int, help="instead of the recipe's number")
    recipe.add_argument("--lrs", nargs="+", metavar="LR", help="learning rates to try, instead of the recipe's own")
    recipe.add_argument("--source", type=Path, help="folder with Multi30k's .gz files, for no download")
    recipe.set_defaults(compare=compare_recipe)
    for command in (depth, recipe):
        add_common_options(command)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    with one_sentence_errors():
        text = args.compare(args)
        command = shown(["python", "scripts/compare_inits.py", *sys.argv[1:]])
        data = "CMUdict" if args.command == "depth" else RECIPES[args.recipe].data.name
        seeds = f"{len(args.seeds)} seeds ({', '.join(map(str, args.seeds))}): mean ± standard deviation"
        text = f"{text}\n\n{provenance(command, data)}\n- {seeds}; losses in bits per token\n"
        name = args.command if args.command == "depth" else args.recipe
        table = args.out / f"{name}.md"
        table.write_text(text)
        print(f"\n{text}\nwritten to {table}")


if __name__ == "__main__":
    main()
