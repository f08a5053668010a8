"""What GradInit does for a training, measured: short trainings of the stock Transformer by `fairseq-train`.

    python scripts/compare_gradinit.py effect       without GradInit, with it, with warmup; Adam and SGD, two depths
    python scripts/compare_gradinit.py sweep        gamma, overlap and the number of iterations, one at a time
    python scripts/compare_gradinit.py stability    learning rate and beta2 (figure 3 of the paper)
    python scripts/compare_gradinit.py warmup       how long a warmup serves the baseline best
    python scripts/compare_gradinit.py tfixup       GradInit on top of T-Fixup
    python scripts/compare_gradinit.py norms        gradient norms before training, by size: what gamma is set against

Each writes a Markdown table; `sweep` and `stability` a picture too. Finished trainings are kept: interrupted, the
same command goes on, and commands with different `--seeds` may run side by side.
"""

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark_speed import build
from compare_inits import last_loss, mean_and_spread, parse_depth, short_run
from console import one_sentence_errors, shown
from plot_curves import COLOURS, drawing
from provenance import markdown_table, provenance
from recipes import ADAM, G2P, MULTI30K, POST_LN, POST_LN_WARMUP, T_FIXUP, Recipe, Variant, model_options
from steps import prepare
from training_run import exit_on_sigterm

DATA = {"cmudict": G2P, "multi30k": MULTI30K}
OPTIMIZERS = {"adam": ADAM, "sgd": ("--optimizer=sgd", "--momentum=0.9")}
LEARNING_RATES = {"adam": "2e-3", "sgd": "0.1"}
WARMUPS = {"adam": 150, "sgd": 150}  # updates; the best of the study `warmup`, 6+6 layers


@dataclass(frozen=True)
class Subject:
    """What is trained, and for how long: data, optimiser, size."""

    data: str = "cmudict"
    optimizer: str = "adam"
    depth: tuple[int, int] = (6, 6)
    width: int = 64
    lr: str = "2e-3"
    beta2: str = "0.98"
    updates: int = 300
    warmup_updates: int = 150
    max_tokens: int = 1024
    label_smoothing: float = 0

    def recipe(self, seed: int) -> Recipe:
        """A short training to a learning rate of zero, every update logged: no checkpoints, no dropout."""
        base, optimizer = DATA[self.data], OPTIMIZERS[self.optimizer]
        if self.optimizer == "adam":
            optimizer = (optimizer[0], f"--adam-betas=(0.9, {self.beta2})")
        criterion = ("--criterion=cross_entropy",)
        if self.label_smoothing:
            smoothing = f"--label-smoothing={self.label_smoothing:g}"
            criterion = ("--criterion=label_smoothed_cross_entropy", smoothing)
        training = (*criterion, "--dropout=0", f"--max-tokens={self.max_tokens}", "--num-workers=0")
        return replace(
            base,
            model=(*model_options(self.width, 2 * self.width, 4, *self.depth), base.model[-1]),
            optimizer=optimizer,
            lr=self.lr,
            decay_period=None,
            warmup_updates=self.warmup_updates,
            updates=self.updates,
            save_every=0,
            log_every=1,
            training=training,
            seed=seed,
        )

    @property
    def label(self) -> str:
        """As in `cmudict, adam, 6+6 layers, width 64`."""
        return f"{self.data}, {self.optimizer}, {self.depth[0]}+{self.depth[1]} layers, width {self.width}"

    @property
    def folder(self) -> str:
        """A name that no other subject has."""
        beta2 = f"-beta{self.beta2}" if self.optimizer == "adam" else ""
        size = f"{self.depth[0]}+{self.depth[1]}-width{self.width}"
        smoothing = f"-smoothed{self.label_smoothing:g}" if self.label_smoothing else ""
        batches = f"{self.updates}x{self.max_tokens}"
        return f"{self.data}-{size}-{self.optimizer}-lr{self.lr}{beta2}-{batches}{smoothing}"


def with_gradinit(base: Variant, **settings: float) -> Variant:
    """A way to start a Transformer, with GradInit before it; `settings` are the plugin's options."""
    name = "-".join(f"{option}{value:g}" for option, value in settings.items())
    options = tuple(f"--gradinit-{option}={value:g}" for option, value in settings.items())
    return Variant(
        f"{base.name}-gradinit-{name}",
        base.label.replace("no warmup", "GradInit"),
        (*base.options, "--task=gradinit_translation", *options),
        base.warmup,
    )


def subject_of(args: argparse.Namespace, data: str, optimizer: str, depth: tuple[int, int]) -> Subject:
    """What the command line asks to train."""
    return Subject(
        data,
        optimizer,
        depth,
        args.width,
        args.lr or LEARNING_RATES[optimizer],
        updates=args.updates,
        warmup_updates=WARMUPS[optimizer] if args.warmup is None else args.warmup,
        label_smoothing=args.label_smoothing,
    )


def gradinit_settings(args: argparse.Namespace) -> dict[str, float]:
    """GradInit's settings that the command line gives; the plugin's defaults hold for the others."""
    given = {"iterations": args.iterations, "gamma": args.gamma, "lr": args.scale_lr}
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Measured:
    """What came out of one subject and one start, over seeds: the last losses, and what GradInit did."""

    losses: tuple[float, ...]
    seeds: int
    constrained: tuple[float, ...]

    @property
    def loss(self) -> str:
        """Mean and spread of the last losses; how many overflowed, if any."""
        overflowed = self.seeds - len(self.losses)
        note = f" ({overflowed} of {self.seeds} diverged)" if self.losses and overflowed else ""
        return mean_and_spread(self.losses) + note

    @property
    def share(self) -> str:
        """Share of GradInit's iterations that went to the constraint."""
        return f"{statistics.mean(self.constrained):.0%}" if self.constrained else "-"


class Laboratory:
    """Trains points, each once, and keeps their folders."""

    def __init__(self, out: Path, seeds: Sequence[int]):
        self.out, self.seeds = out, seeds

    def measure(self, subject: Subject, variant: Variant) -> Measured:
        """Train one start of one subject with every seed."""
        losses, constrained = [], []
        for seed in self.seeds:
            warmup = subject.warmup_updates if variant.warmup else ""
            folder = self.out / subject.folder / f"{variant.name}{warmup}-seed{seed}"
            scales = folder / "scales.json"
            learned = "--task=gradinit_translation" in variant.options
            extra = (f"--gradinit-scales={scales}",) if learned else ()
            start = replace(variant, options=(*variant.options, *extra))
            log = short_run(subject.recipe(seed), start, folder, f"{subject.folder} {variant.name} seed {seed}")
            if log is not None:
                losses.append(last_loss(log))
            if learned:
                history = json.loads(scales.read_text())["history"]
                constrained.append(statistics.mean(record["constrained"] for record in history))
        return Measured(tuple(losses), len(self.seeds), tuple(constrained))


def effect(lab: Laboratory, args: argparse.Namespace) -> str:
    """Without GradInit, with it, with warmup: every data set, optimiser and depth."""
    rows = []
    for data in args.data:
        for optimizer in args.optimizers:
            for depth in args.depths:
                subject = subject_of(args, data, optimizer, depth)
                starts = (POST_LN, with_gradinit(POST_LN, **gradinit_settings(args)), POST_LN_WARMUP)
                cold, learned, warm = (lab.measure(subject, start) for start in starts)
                warmup = str(subject.warmup_updates)
                rows.append([subject.label, subject.lr, cold.loss, learned.loss, learned.share, warm.loss, warmup])
                print(" | ".join(rows[-1]), flush=True)
    header = ["training", "learning rate", "cold", "GradInit", "constrained", "warmup", "updates of warmup"]
    return markdown_table(header, rows)


def warmup(lab: Laboratory, args: argparse.Namespace) -> str:
    """The loss of Post-LN by the length of its warmup: what to compare with."""
    rows = []
    for data in args.data:
        for optimizer in args.optimizers:
            for depth in args.depths:
                subject = subject_of(args, data, optimizer, depth)
                starts = [replace(subject, warmup_updates=updates) for updates in args.warmups]
                losses = [lab.measure(start, POST_LN_WARMUP).loss for start in starts]
                rows.append([subject.label, subject.lr, *losses])
                print(" | ".join(rows[-1]), flush=True)
    header = ["training", "learning rate", *(f"{updates} updates" for updates in args.warmups)]
    return markdown_table(header, rows)


def sweep(lab: Laboratory, args: argparse.Namespace) -> str:
    """GradInit's settings, one at a time, around those of `--iterations` and the plugin's defaults."""
    subject = subject_of(args, args.data[0], args.optimizers[0], args.depths[0])
    without = lab.measure(subject, POST_LN)
    rows = [["none", "-", without.loss, "-"]]
    points: dict[str, list[tuple[float, Measured]]] = {}
    values = {"gamma": args.gammas, "overlap": args.overlaps, "iterations": args.iteration_counts, "lr": args.scale_lrs}
    for setting, choices in values.items():
        for value in choices:
            settings = gradinit_settings(args) | {setting: value}
            measured = lab.measure(subject, with_gradinit(POST_LN, **settings))
            points.setdefault(setting, []).append((value, measured))
            rows.append([setting, f"{value:g}", measured.loss, measured.share])
            print(" | ".join(rows[-1]), flush=True)
    picture = args.out / "sweep.png"
    draw_sweep(points, without, picture, f"{subject.label}: loss after {subject.updates} updates")
    return f"{subject.label}\n\n" + markdown_table(["setting", "value", "loss", "constrained"], rows)


def draw_sweep(points: dict[str, list[tuple[float, Measured]]], without: Measured, out: Path, title: str) -> None:
    """One panel for each setting: the loss by its value, and the loss without GradInit as a line."""
    with drawing(out, (3.2 * len(points), 3.4), columns=len(points)) as axes_of_all:
        for axes, (setting, measured) in zip(axes_of_all, points.items(), strict=True):
            kept = [(value, statistics.mean(point.losses)) for value, point in measured if point.losses]
            axes.plot(*zip(*kept, strict=True), "o-", color=COLOURS[0], label="with GradInit")
            if without.losses:
                axes.axhline(statistics.mean(without.losses), color=COLOURS[1], linestyle="--", label="without")
            if setting != "overlap":
                axes.set_xscale("log")
            values = [value for value, _ in measured]
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_xticks([], minor=True)
            axes.set_xlabel({"lr": "learning rate of the scales"}.get(setting, setting))
        axes_of_all[0].set_ylabel("loss (bits per token)")
        axes_of_all[0].legend(frameon=False)
        axes_of_all[0].set_title(title, loc="left", fontsize=10)


def stability(lab: Laboratory, args: argparse.Namespace) -> str:
    """Loss by learning rate and beta2, without and with GradInit and with warmup."""
    base = subject_of(args, args.data[0], "adam", args.depths[0])
    starts = (POST_LN, with_gradinit(POST_LN, **gradinit_settings(args)), POST_LN_WARMUP)
    rows, curves = [], {}
    for start in starts:
        for beta2 in args.betas2:
            results = [lab.measure(replace(base, lr=lr, beta2=beta2), start) for lr in args.lrs]
            rows.append([start.label, beta2, *(result.loss for result in results)])
            curves[start.label, beta2] = [statistics.mean(r.losses) if r.losses else None for r in results]
            print(" | ".join(rows[-1]), flush=True)
    draw_stability(curves, [float(lr) for lr in args.lrs], args.out / "stability.png", base.label)
    return f"{base.label}\n\n" + markdown_table(["start", "beta2", *(f"lr {lr}" for lr in args.lrs)], rows)


def draw_stability(curves: dict[tuple[str, str], list[float | None]], lrs: list[float], out: Path, title: str) -> None:
    """The loss by learning rate: a colour for each start, a line style for each beta2; gaps where it diverged."""
    labels = list(dict.fromkeys(label for label, _ in curves))
    betas2 = list(dict.fromkeys(beta2 for _, beta2 in curves))
    with drawing(out, (7.5, 4.5)) as (axes,):
        for (label, beta2), losses in curves.items():
            values = [float("nan") if loss is None else loss for loss in losses]
            style = ("-", "--", ":")[betas2.index(beta2) % 3]
            colour = COLOURS[labels.index(label)]
            axes.plot(lrs, values, style, marker="o", color=colour, label=f"{label}, beta2 {beta2}")
        axes.set_xscale("log")
        axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss (bits per token)")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8)


def tfixup(lab: Laboratory, args: argparse.Namespace) -> str:
    """T-Fixup alone and with GradInit after it."""
    rows = []
    for data in args.data:
        for depth in args.depths:
            subject = subject_of(args, data, "adam", depth)
            alone = lab.measure(subject, T_FIXUP)
            both = lab.measure(subject, with_gradinit(T_FIXUP, **gradinit_settings(args)))
            rows.append([subject.label, subject.lr, alone.loss, both.loss, both.share])
            print(" | ".join(rows[-1]), flush=True)
    return markdown_table(["training", "learning rate", "T-Fixup", "T-Fixup and GradInit", "constrained"], rows)


def norms(lab: Laboratory, args: argparse.Namespace) -> str:
    """The norms of the gradient at initialisation, which gamma bounds."""
    rows = []
    for data in args.data:
        for width in args.widths:
            for depth in args.depths:
                subject = Subject(data, "adam", depth, width)
                values = [initial_norms(subject.recipe(seed)) for seed in lab.seeds]
                size, l1, l2 = (statistics.mean(column) for column in zip(*values, strict=True))
                label = subject.label.replace(", adam", "")
                rows.append([label, f"{size / 1e6:.2f}", f"{l1:.0f}", f"{l2:.1f}", f"{l1 / size**0.5:.1f}"])
                print(" | ".join(rows[-1]), flush=True)
    header = ["model", "million parameters", "l1 norm", "l2 norm", "l1 norm / sqrt(parameters)"]
    return markdown_table(header, rows)


def initial_norms(recipe: Recipe) -> tuple[int, float, float]:
    """Number of parameters, and the l1 and l2 norm of the gradient of one batch, before training."""
    trainer, (batch,) = build(recipe, POST_LN, 1)
    loss, sample_size, _ = trainer.get_criterion()(trainer.get_model(), batch)
    parameters = list(trainer.get_model().parameters())
    (loss / sample_size).backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    l1 = sum(gradient.abs().sum().item() for gradient in gradients)
    l2 = sum(gradient.square().sum().item() for gradient in gradients) ** 0.5
    return sum(parameter.numel() for parameter in parameters), l1, l2


STUDIES: dict[str, Callable[[Laboratory, argparse.Namespace], str]] = {
    "effect": effect,
    "warmup": warmup,
    "sweep": sweep,
    "stability": stability,
    "tfixup": tfixup,
    "norms": norms,
}


def prepare_all(names: Iterable[str], source: Path | None) -> None:
    """Make the data sets."""
    for name in names:
        prepare(DATA[name], source)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What GradInit does for short trainings.")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--source", type=Path, help="folder with Multi30k's .gz files, for no download")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--depths", nargs="+", type=parse_depth, default=[(6, 6), (12, 12)], metavar="ENC+DEC")
    parser.add_argument("--width", type=int, default=Subject.width)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64, 128, 256, 512], help="of norms")
    parser.add_argument("--updates", type=int, default=Subject.updates)
    parser.add_argument("--lr", help=f"default: {LEARNING_RATES}")
    parser.add_argument("--label-smoothing", type=float, default=0)
    parser.add_argument("--warmup", type=int, help=f"updates of the baseline's warmup; default: {WARMUPS}")
    parser.add_argument("--warmups", nargs="+", type=int, default=[30, 60, 100, 150, 200], help="of warmup")
    parser.add_argument("--iterations", type=int, default=300, help="of GradInit")
    parser.add_argument("--gamma", type=float, help="of GradInit; default: the plugin's")
    parser.add_argument("--scale-lr", type=float, help="learning rate of the scales; default: the plugin's")
    parser.add_argument("--gammas", nargs="*", type=float, default=[30, 100, 300, 1000, 3000], help="of sweep")
    parser.add_argument("--overlaps", nargs="*", type=float, default=[0, 0.5, 1], help="of sweep")
    parser.add_argument("--iteration-counts", nargs="*", type=int, default=[30, 100, 300], help="of sweep")
    parser.add_argument("--scale-lrs", nargs="*", type=float, default=[1e-3, 2.5e-3, 1e-2, 3e-2], help="of sweep")
    parser.add_argument("--lrs", nargs="+", default=["5e-4", "1e-3", "2e-3", "4e-3", "8e-3"], help="of stability")
    parser.add_argument("--betas2", nargs="+", default=["0.98", "0.995"], help="of stability")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_gradinit"), help="folder for runs and tables")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    logging.disable(logging.WARNING)
    with one_sentence_errors():
        prepare_all(args.data, args.source)
        text = STUDIES[args.study](Laboratory(args.out, args.seeds), args)
        command = shown(["python", "scripts/compare_gradinit.py", *sys.argv[1:]])
        seeds = f"seeds {', '.join(map(str, args.seeds))}: mean ± standard deviation; losses in bits per token"
        text = f"{text}\n\n{provenance(command, ', '.join(args.data))}\n- {seeds}\n"
        table = args.out / f"{args.study}.md"
        table.write_text(text)
        print(f"\n{text}\nwritten to {table}")


if __name__ == "__main__":
    main()
