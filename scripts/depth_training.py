"""`depth_study.py train`: short trainings by `fairseq-train` over starts, depths, learning rates and seeds."""

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compare_inits import LAST_UPDATES, mean_and_spread, short_run
from console import shown
from depth_starts import (
    ARCH_HELP,
    LAYERS_HELP,
    Depth,
    Size,
    add_size_options,
    depth_named,
    listed,
    positive,
    size_of,
    start_named,
)
from plot_curves import COLOURS, drawing
from provenance import markdown_table, provenance
from recipes import Recipe, Variant
from steps import prepare
from training_log import TrainingLog, read_log
from training_run import exit_on_sigterm

STALLED = 0.9  # of the entropy of single target tokens: a loss above that has learned little beyond them
LINES = ("-", "--", ":")
TARGET_TEXT = {"cmudict": "text/train.phones", "multi30k": "pieces/train.en"}


@dataclass(frozen=True)
class Outcome:
    """How one training ended.

    Attributes:
        losses: training loss of each update, in bits a target token, as far as it went.
        seconds: since the start of the first update, at each of them.
        diverged_at: the update whose gradient was not finite, or None.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    diverged_at: int | None = None

    @property
    def smooth(self) -> list[float]:
        """The mean loss of each update and of those before it, `LAST_UPDATES` in all."""
        return [
            statistics.mean(self.losses[max(0, end - LAST_UPDATES) : end]) for end in range(1, len(self.losses) + 1)
        ]

    @property
    def loss(self) -> float:
        """The mean loss of the last updates; infinite where the training diverged."""
        return math.inf if self.diverged_at is not None else self.smooth[-1]

    def reaches(self, loss: float) -> int | None:
        """The first update whose smoothed loss is no more than this; None where there is none, or it diverged."""
        if self.diverged_at is not None:
            return None
        found = (update for update, own in enumerate(self.smooth, start=1) if own <= loss and update >= LAST_UPDATES)
        return next(found, None)


def outcome_of(log: TrainingLog, diverged: bool) -> Outcome:
    """The outcome that a log tells of."""
    updates, losses = log.losses("train")
    walls = log.curve("train", "wall")[1]
    return Outcome(
        tuple(losses),
        tuple(wall - walls[0] for wall in walls),
        (updates[-1] if updates else 0) + 1 if diverged else None,
    )


@dataclass(frozen=True)
class Cell:
    """One start at one depth: what came of it, by learning rate and seed."""

    start: Variant
    depth: Depth
    outcomes: dict[tuple[str, int], Outcome]

    def of(self, lr: str) -> list[Outcome]:
        """The outcomes at a learning rate, by seed."""
        return [outcome for (own, _), outcome in self.outcomes.items() if own == lr]

    @property
    def rates(self) -> list[str]:
        return list(dict.fromkeys(lr for lr, _ in self.outcomes))

    @property
    def best_rate(self) -> str:
        """The learning rate with the least loss with the first seed."""
        return min(self.rates, key=lambda lr: self.of(lr)[0].loss)

    @property
    def best(self) -> list[Outcome]:
        """The outcomes at the best learning rate."""
        return self.of(self.best_rate)

    @property
    def loss(self) -> float:
        """Mean over the seeds of the best learning rate."""
        return statistics.mean(outcome.loss for outcome in self.best)


class Laboratory:
    """Trains the points of a study, and keeps what came of each."""

    def __init__(self, size: Size, updates: int, out: Path):
        self.size, self.updates, self.out = size, updates, out

    def measure(self, start: Variant, depth: Depth, lr: str, seed: int) -> Outcome:
        """Train one point, or read what came of it before."""
        recipe = self.size.recipe(depth, lr, self.updates, seed)
        folder = self.folder(recipe, depth) / f"{start.name}-lr{lr}-seed{seed}"
        log = short_run(recipe, start, folder, f"{depth} layers, {start.name}, lr {lr}, seed {seed}")
        if log is not None:
            return outcome_of(log, diverged=False)
        file = folder / "log.jsonl"
        return outcome_of(read_log(file) if file.exists() else TrainingLog(), diverged=True)

    def folder(self, recipe: Recipe, depth: Depth) -> Path:
        """The folder of all points of a depth."""
        size = self.size
        subject = f"{size.data}-{size.optimizer}-width{size.width}"
        return self.out / subject / f"{depth}-layers-{recipe.updates}-updates"


def scaled(lr: str, layers: float, beyond: float) -> str:
    """A learning rate tuned at `layers`, for a greater depth: it falls with the square root of N."""
    return f"{float(lr) * math.sqrt(layers / beyond):.2g}"


def train_start(lab: Laboratory, start: Variant, args: argparse.Namespace) -> list[Cell]:
    """All depths of one start.

    Up to `args.tune` layers every learning rate is tried, beyond only the best one of the last of those, scaled; the
    first seed chooses, and the others follow at the rate that it chose.
    """
    cells: list[Cell] = []
    tuned: Cell | None = None
    for depth in sorted(args.layers, key=lambda depth: depth.layers):
        if tuned is not None and depth.layers > args.tune:
            rates = [scaled(tuned.best_rate, tuned.depth.layers, depth.layers)]
        else:
            rates = args.lrs
        first, *others = args.seeds
        cell = Cell(start, depth, {(lr, first): lab.measure(start, depth, lr, first) for lr in rates})
        best = cell.best_rate
        more = {(best, seed): lab.measure(start, depth, best, seed) for seed in others}
        cells.append(replace(cell, outcomes=cell.outcomes | more))
        if depth.layers <= args.tune:
            tuned = cells[-1]
    return cells


def entropy(text: Path) -> float:
    """Entropy of a token of a text, ends of lines counted, in bits: the loss of a model that knows frequencies only."""
    lines = text.read_text(encoding="utf-8").splitlines()
    counts = Counter(token for line in lines for token in (*line.split(), None))
    return -math.fsum(n / counts.total() * math.log2(n / counts.total()) for n in counts.values())


def state(outcomes: Sequence[Outcome], stall: float) -> str:
    """What became of the trainings of one learning rate, in a word or two."""
    diverged = sorted(outcome.diverged_at for outcome in outcomes if outcome.diverged_at is not None)
    if diverged:
        return f"{len(diverged)} of {len(outcomes)} diverged, update {', '.join(map(str, diverged))}"
    stalled = sum(outcome.loss > stall for outcome in outcomes)
    return f"{stalled} of {len(outcomes)} stalled" if stalled else "trained"


def row(cell: Cell, reference: Cell | None, stall: float) -> list[str]:
    """A line of the table: loss, and how soon the loss of the reference is reached."""
    sound = [outcome.loss for outcome in cell.best if math.isfinite(outcome.loss)]
    seconds = [outcome.seconds[-1] for outcome in cell.best if outcome.seconds]
    reached = [outcome.reaches(reference.loss) for outcome in cell.best] if reference else []
    times = [
        outcome.seconds[update - 1] for outcome, update in zip(cell.best, reached, strict=False) if update is not None
    ]
    all_reached = bool(reached) and len(times) == len(reached)
    return [
        str(cell.depth),
        cell.start.label,
        cell.best_rate,
        mean_and_spread(sound, 3),
        state(cell.best, stall),
        f"{statistics.mean(u for u in reached if u is not None):.0f}" if all_reached else "-",
        f"{statistics.mean(times):.0f}" if all_reached else "-",
        f"{statistics.mean(seconds):.0f}" if seconds else "-",
    ]


def table(cells: Sequence[Cell], stall: float) -> str:
    """The table, depth by depth; the losses to reach are those of the first start that has a warmup."""
    header = [
        "layers",
        "start",
        "learning rate",
        "loss",
        "",
        "updates to the loss of",
        "seconds to it",
        "seconds in all",
    ]
    with_warmup = next((cell.start for cell in cells if cell.start.warmup), None)
    references = {cell.depth: cell for cell in cells if cell.start == with_warmup and math.isfinite(cell.loss)}
    header[5] += f" {with_warmup.label}" if with_warmup else " the reference"
    order = sorted(cells, key=lambda cell: cell.depth.layers)
    return markdown_table(header, [row(cell, references.get(cell.depth), stall) for cell in order])


def rate_table(cells: Sequence[Cell]) -> str:
    """Every point: the loss of each learning rate with the first seed."""
    rates = sorted({lr for cell in cells for lr in cell.rates if len(cell.rates) > 1}, key=float)
    rows = []
    for cell in cells:
        if len(cell.rates) > 1:
            losses = [cell.of(lr)[0] if lr in cell.rates else None for lr in rates]
            rows.append([cell.start.label, str(cell.depth), *map(shown_loss, losses)])
    return markdown_table(["start", "layers", *rates], rows) if rows else ""


def shown_loss(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return f"{outcome.loss:.2f}" if outcome.diverged_at is None else f"diverged, update {outcome.diverged_at}"


def draw_depths(cells: Sequence[Cell], stall: float, out: Path) -> None:
    """Loss against depth, a line for each start, and the curves of the deepest of the full-length trainings."""
    starts = list(dict.fromkeys(cell.start for cell in cells))
    full = [cell.depth for cell in cells if cell.depth.updates is None] or [cell.depth for cell in cells]
    deepest = max(full, key=lambda depth: depth.layers)
    depths = sorted({cell.depth for cell in cells}, key=lambda depth: depth.layers)
    with drawing(out, (13, 4.8), columns=2) as (by_depth, curves):
        for index, start in enumerate(starts):
            look = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}
            own = {cell.depth: cell for cell in cells if cell.start == start}
            sound = [depth for depth in depths if depth in own and math.isfinite(own[depth].loss)]
            places = [depths.index(depth) for depth in sound]
            by_depth.plot(places, [own[depth].loss for depth in sound], marker="o", label=start.label, **look)
            lost = [depths.index(depth) for depth, cell in own.items() if not math.isfinite(cell.loss)]
            by_depth.plot(lost, [1.15 * stall] * len(lost), "x", color=look["color"], markersize=8)
            for outcome in own[deepest].best if deepest in own else []:
                curves.plot(range(1, len(outcome.losses) + 1), outcome.smooth, linewidth=1.3, **look)
        by_depth.axhline(stall, color="#8d96a3", linestyle=":", linewidth=1)
        by_depth.annotate(
            "knows only how frequent tokens are", (0, stall), (0, 3), textcoords="offset points", fontsize=8
        )
        by_depth.set_xticks(range(len(depths)), [depth_label(depth) for depth in depths])
        by_depth.set(xlabel="layers of encoder and of decoder", ylabel="training loss (bits a token), last updates")
        curves.set(xlabel="updates", ylim=(0, 1.6 * stall))
        curves.set_title(f"{deepest}+{deepest} layers" if deepest.encoder == deepest.decoder else f"{deepest} layers")
        by_depth.legend(frameon=False, fontsize=8)


def depth_label(depth: Depth) -> str:
    """As on the axis of a picture."""
    return f"{depth}\n({depth.updates} updates)" if depth.updates else str(depth)


def draw_map(cells: Sequence[Cell], stall: float, out: Path) -> None:
    """A panel for each start: depth and learning rate, coloured by the loss with the first seed; a cross diverged."""
    starts = list(dict.fromkeys(cell.start for cell in cells))
    depths = sorted({cell.depth for cell in cells}, key=lambda depth: depth.layers)
    tried = {lr for cell in cells for lr in cell.rates if len(cell.rates) > 1}
    rates = sorted(tried or {lr for cell in cells for lr in cell.rates}, key=float)  # scaled ones would overlap
    losses = [outcome.loss for cell in cells for outcome in cell.outcomes.values() if math.isfinite(outcome.loss)]
    scale = {"vmin": min([*losses, stall / 2]), "vmax": stall, "cmap": "viridis_r"}
    with drawing(out, (2.2 * len(starts) + 1.4, 3.6), columns=len(starts)) as panels:
        for axes, start in zip(panels, starts, strict=True):
            points = [
                (depths.index(cell.depth), float(lr), cell.of(lr)[0].loss)
                for cell in cells
                if cell.start == start
                for lr in cell.rates
            ]
            sound = [point for point in points if math.isfinite(point[2])]
            lost = [point for point in points if not math.isfinite(point[2])]
            x, y, loss = zip(*sound, strict=True) if sound else ((), (), ())
            colours = axes.scatter(x, y, c=loss, s=170, marker="s", **scale)
            axes.plot([point[0] for point in lost], [point[1] for point in lost], "x", color="#d1495b", markersize=9)
            axes.set(yscale="log", xlabel="layers", xlim=(-0.6, len(depths) - 0.4))
            axes.set_title(start.label, fontsize=9)
            axes.set_xticks(range(len(depths)), list(map(str, depths)))
            axes.set_yticks([float(lr) for lr in rates], rates)
            axes.minorticks_off()
        panels[0].set_ylabel("learning rate")
        panels[0].figure.colorbar(colours, ax=panels, label=f"loss (bits a token; {stall:.1f} or more: stalled)")


def train_study(args: argparse.Namespace) -> str:
    """Train all points; return the tables, and write them and the pictures into the folder of the study."""
    exit_on_sigterm()
    lab = Laboratory(size_of(args), args.updates, args.out)
    recipe = lab.size.recipe(args.layers[0], args.lrs[0], args.updates, args.seeds[0])
    prepare(recipe)
    cells = [cell for start in args.arch for cell in train_start(lab, start, args)]
    stall = STALLED * entropy(recipe.data / TARGET_TEXT[lab.size.data])
    command = shown(["python", "scripts/depth_study.py", *sys.argv[1:]])
    parts = [
        table(cells, stall),
        rate_table(cells),
        f"{provenance(command, lab.size.data)}\n- {seeds_line(args)}; losses in bits a target token, mean of the last "
        f"{LAST_UPDATES} updates; above {stall:.2f}, which is {STALLED:g} of the entropy of single tokens, "
        "a training has stalled",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (args.out / f"{args.name}.md").write_text(text)
    draw_depths(cells, stall, args.out / f"{args.name}.png")
    draw_map(cells, stall, args.out / f"{args.name}_rates.png")
    return text


def seeds_line(args: argparse.Namespace) -> str:
    seeds = ", ".join(map(str, args.seeds))
    return f"seeds {seeds}" + (": mean ± standard deviation" if len(args.seeds) > 1 else "")


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--arch", type=listed(start_named), required=True, metavar="A,B,...", help=ARCH_HELP)
    parser.add_argument("--layers", type=listed(depth_named), required=True, metavar="N,N,...", help=LAYERS_HELP)
    parser.add_argument("--lrs", type=listed(positive), required=True, metavar="LR,LR,...", help="learning rates")
    parser.add_argument(
        "--tune",
        type=float,
        default=math.inf,
        metavar="N",
        help="beyond N layers try no rates, but scale the best one found: it falls with the square root of the layers",
    )
    parser.add_argument("--seeds", type=listed(int), default=[1], metavar="SEED,SEED,...")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/depth_study"), help="folder for trainings and tables")
    parser.add_argument("--name", default="train", help="of the table and the pictures")
    add_size_options(parser)
    parser.set_defaults(run=train_study)
