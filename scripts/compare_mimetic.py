"""What mimetic self-attention does for a training, measured by short trainings with `fairseq-train`.

    python scripts/compare_mimetic.py language       a language model of words (Brown): plain, mimetic, half of it, ...
    python scripts/compare_mimetic.py translation    spelling to phones (CMUdict), with LayerNorm and with T-Fixup
    python scripts/compare_mimetic.py depth          language models of characters, Pre-LN and T-Fixup, by depth

Each writes a Markdown table and a picture. Finished trainings are kept: interrupted, the same command goes on, and
commands with different `--seeds` may run side by side.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compare_inits import last_loss, mean_and_spread, short_run
from console import one_sentence_errors, shown
from plot_curves import COLOURS, drawing
from provenance import markdown_table, provenance
from recipes import (
    BROWN,
    BROWN_CHARACTERS,
    G2P,
    MIMETIC_LM,
    PLAIN_LM,
    POST_LN_WARMUP,
    PRE_LN,
    T_FIXUP,
    Recipe,
    Variant,
    decoder_options,
    model_options,
    text_at,
)
from steps import prepare
from training_log import TrainingLog
from training_run import exit_on_sigterm


def changed(base: Variant, name: str, *options: str) -> Variant:
    """A start that differs from another by options."""
    return Variant(f"{base.name}-{name}", f"{base.label}, {name.replace('-', ' ')}", (*base.options, *options))


LEARNED = "--decoder-learned-pos"
BOTH = (PLAIN_LM, MIMETIC_LM)
ABLATIONS = (
    changed(MIMETIC_LM, "queries-and-keys-only", "--mimetic-vo=none"),
    changed(MIMETIC_LM, "values-and-output-only", "--mimetic-qk=none"),
    changed(MIMETIC_LM, "sign-plus", "--mimetic-vo-sign=1"),
    changed(MIMETIC_LM, "positions-times-2", "--position-scale=2"),
    changed(MIMETIC_LM, "learned-positions", LEARNED),
    changed(PLAIN_LM, "learned-positions", LEARNED),
    changed(PLAIN_LM, "positions-times-2", "--position-scale=2"),
)


def mimetic(base: Variant) -> Variant:
    """A start of a translation model with mimetic self-attention, with the shares for language."""
    options = [option.replace("--arch=transformer", "--arch=transformer_mimetic") for option in base.options]
    if base == T_FIXUP:
        options = [*base.options, "--mimetic-qk=0,0.5", "--mimetic-vo=0.2,0.2"]
    return replace(base, name=f"{base.name}-mimetic", label=f"{base.label}, mimetic", options=tuple(options))


@dataclass(frozen=True)
class Runs:
    """The logs of one start, one for each seed that did not overflow."""

    logs: tuple[TrainingLog, ...]
    seeds: int

    def last(self, key: str) -> list[float]:
        """The last value of a statistic of validation, of each run."""
        return [log.curve("valid", key)[1][-1] for log in self.logs]

    def cell(self, key: str, digits: int) -> str:
        """Mean and spread of the last value of a statistic of validation."""
        lost = self.seeds - len(self.logs)
        return mean_and_spread(self.last(key), digits) + (f" ({lost} of {self.seeds} diverged)" if lost else "")


class Laboratory:
    """Trains recipes, each with every seed, and keeps the folders."""

    def __init__(self, out: Path):
        self.out = out

    def measure(self, recipe: Recipe, variant: Variant, seeds: Sequence[int]) -> Runs:
        """Train one start with every seed; validation as the recipe has it, no checkpoints."""
        logs = []
        for seed in seeds:
            seeded = replace(recipe, seed=seed, training=(*recipe.training, "--no-save"))
            folder = self.out / f"{recipe.name}-{recipe.updates}" / f"{variant.name}-seed{seed}"
            logs.append(short_run(seeded, variant, folder, f"{recipe.name} {variant.name} seed {seed}"))
        return Runs(tuple(log for log in logs if log is not None), len(seeds))


def language(lab: Laboratory, args: argparse.Namespace) -> str:
    """Plain and mimetic with every seed, the rest with the first one."""
    recipe = BROWN.shortened(args.updates or 500)
    prepare(recipe, args.source)
    starts = dict.fromkeys(BOTH, args.seeds) | dict.fromkeys(ABLATIONS, args.seeds[:1])
    measured, rows = {}, []
    for start, seeds in starts.items():
        runs = measured[start] = lab.measure(recipe, start, seeds)
        first = Runs(runs.logs[:1], 1) if len(seeds) > 1 else runs
        rows.append([start.label, runs.cell("word_ppl", 1), first.cell("word_ppl", 1), ", ".join(map(str, seeds))])
        print(" | ".join(rows[-1]), flush=True)
    curves = {start.label: runs for start, runs in measured.items() if start in BOTH}
    draw_curves(curves, "word_ppl", "validation perplexity (words)", args.out / "language.png", zoom=True)
    return markdown_table(["start", "validation perplexity", f"seed {args.seeds[0]} alone", "seeds"], rows)


def translation(lab: Laboratory, args: argparse.Namespace) -> str:
    """With LayerNorm, after and before each block, and without it; plain and mimetic."""
    updates = args.updates or 300
    recipe = replace(
        G2P,
        name="cmudict-6+6",
        model=(*model_options(64, 128, 4, 6, 6), G2P.model[-1]),
        warmup_updates=updates // 2,  # the best length in the study `warmup` of compare_gradinit.py
        updates=updates,
        save_every=100,
        training=("--criterion=cross_entropy", "--dropout=0", "--max-tokens=1024", "--num-workers=0"),
    )
    prepare(recipe)
    rows, curves = [], {}
    for base in (POST_LN_WARMUP, PRE_LN, T_FIXUP):
        runs = [lab.measure(recipe, start, args.seeds) for start in (base, mimetic(base))]
        curves |= {base.label: runs[0], f"{base.label}, mimetic": runs[1]}
        rows.append([base.label, *(run.cell("loss", 3) for run in runs)])
        print(" | ".join(rows[-1]), flush=True)
    draw_curves(curves, "loss", "validation loss (bits per phone)", args.out / "translation.png")
    return markdown_table(["start", "plain", "mimetic"], rows)


def depth(lab: Laboratory, args: argparse.Namespace) -> str:
    """Pre-LN and T-Fixup without LayerNorm, no warmup for either, as deep as asked."""
    rows, curves = [], {}
    for layers in args.layers:
        base = replace(
            BROWN_CHARACTERS,
            name=f"brown-characters-{layers}-layers",
            lr=args.lr,
            updates=args.updates or 300,
            save_every=100,
            log_every=1,
            training=(*text_at("char", 128), "--criterion=cross_entropy", "--dropout=0", "--max-tokens=1024"),
        )
        prepare(base, args.source)
        pre_ln = replace(base, model=decoder_options(64, 256, 4, layers))
        without = tuple(option for option in pre_ln.model if option != "--decoder-normalize-before")
        fixed = Variant("tfixup", "T-Fixup", ("--arch=transformer_lm_tfixup",))
        subjects = {"Pre-LN": (pre_ln, PLAIN_LM), "T-Fixup": (replace(base, model=without), fixed)}
        runs = {label: lab.measure(recipe, start, args.seeds) for label, (recipe, start) in subjects.items()}
        curves |= {f"{label}, {layers} layers": run for label, run in runs.items()}
        rows.append([str(layers), *(run.cell("bpc", 3) for run in runs.values())])
        rows[-1] += [mean_and_spread([last_loss(log) for log in run.logs], 3) for run in runs.values()]
        print(" | ".join(rows[-1]), flush=True)
    draw_curves(curves, "bpc", "validation, bits per character", args.out / "depth.png")
    header = ["layers", "Pre-LN, validation", "T-Fixup, validation", "Pre-LN, training", "T-Fixup, training"]
    return markdown_table(header, rows)


def draw_curves(curves: dict[str, Runs], key: str, axis: str, out: Path, zoom: bool = False) -> None:
    """The mean over seeds of a statistic of validation by update, and every seed faintly; plain and its twin in one
    colour. With `zoom`, a second panel shows the second half closely."""
    with drawing(out, (11 if zoom else 7.5, 4.5), columns=2 if zoom else 1, share_y=False) as panels:
        for index, (label, runs) in enumerate(curves.items()):
            colour, style = (COLOURS[index], "-") if zoom else (COLOURS[index // 2], "-" if index % 2 == 0 else "--")
            curves_of_seeds = [log.curve("valid", key) for log in runs.logs]
            if not curves_of_seeds:
                continue
            updates = curves_of_seeds[0][0]
            mean = [statistics.mean(values) for values in zip(*(c[1] for c in curves_of_seeds), strict=True)]
            for axes in panels:
                for _, values in curves_of_seeds:
                    axes.plot(updates, values, style, color=colour, alpha=0.25, linewidth=1)
                axes.plot(
                    updates, mean, style, color=colour, marker="o", markersize=3, label=f"{label}: {mean[-1]:.4g}"
                )
            if zoom:
                half = len(updates) // 2
                low, high = panels[1].get_ylim() if index else (mean[-1], mean[half])
                panels[1].set_ylim(min(low, 0.98 * mean[-1]), max(high, mean[half]))
                panels[1].set_xlim(updates[half], updates[-1])
        for axes in panels:
            axes.set_xlabel("updates")
        panels[0].set_ylabel(axis)
        panels[0].legend(frameon=False, fontsize=8)


STUDIES = {"language": language, "translation": translation, "depth": depth}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What mimetic self-attention does for short trainings.")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--source", type=Path, help="folder with Brown's archive, for no download")
    parser.add_argument("--updates", type=int, help="default: 500 (language), 300 (translation), 300 (depth)")
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 24, 48], help="of depth")
    parser.add_argument("--lr", default="2e-3", help="of depth")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_mimetic"), help="folder for runs and tables")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    with one_sentence_errors():
        text = STUDIES[args.study](Laboratory(args.out), args)
        command = shown(["python", "scripts/compare_mimetic.py", *sys.argv[1:]])
        data = "CMUdict" if args.study == "translation" else "the Brown corpus"
        seeds = f"seeds {', '.join(map(str, args.seeds))}: mean ± standard deviation"
        text = f"{text}\n\n{provenance(command, data)}\n- {seeds}\n"
        table = args.out / f"{args.study}.md"
        table.write_text(text)
        print(f"\n{text}\nwritten to {table}")


if __name__ == "__main__":
    main()
