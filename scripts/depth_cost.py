"""`depth_study.py cost`: seconds and peak memory of an update by depth, with and without `--checkpoint-activations`.

    python scripts/depth_study.py cost --arch tfixup,post_ln --layers 6,18,50,100,200

Both are trained by fairseq's own trainer on the same batches, in turn: A B A B ..., so that whatever else the machine
does falls on both. Memory is the peak of a fresh process each, less what it held before it built the model: data, and
all that a model of 1+1 layers made it load.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import torch
from benchmark_speed import build_from, pass_seconds, trainer_of
from console import UserError, one_sentence_errors, quiet, shown
from depth_starts import (
    ARCH_HELP,
    LAYERS_HELP,
    Depth,
    Size,
    add_size_options,
    depth_named,
    listed,
    size_of,
    start_named,
)
from memory import held, measured_alone, peak
from plot_curves import COLOURS, drawing
from provenance import markdown_table, provenance
from recipes import Recipe, Variant
from steps import prepare
from tqdm import tqdm
from training_run import cuda_is_available, environment, exit_on_sigterm

LR = "1e-6"  # so small that no start diverges meanwhile
MIB = 2**20
MEMORY_NOTE = "memory is what model, optimiser and update take, beyond libraries and data"
HEADER = [
    *("layers", "start", "million parameters"),
    *("s an update", "checkpointing", "ratio (rounds)", "MiB at peak", "checkpointing", "ratio"),
]


@dataclass(frozen=True)
class Cost:
    """What an update of one start costs at one depth; of each pair, the second is with checkpointing.

    Attributes:
        parameters: how many the model has.
        seconds: of an update, mean over a round, round by round.
        memory: bytes at the peak.
    """

    parameters: int
    seconds: Sequence[tuple[float, float]]
    memory: tuple[int, int]

    def median_seconds(self, checkpointing: bool) -> float:
        return statistics.median(both[checkpointing] for both in self.seconds)

    @property
    def time_ratios(self) -> list[float]:
        """Time with checkpointing over that without, round by round."""
        return [checkpointed / plain for plain, checkpointed in self.seconds]


@dataclass(frozen=True)
class Point:
    """One start at one depth, and its cost."""

    start: Variant
    depth: Depth
    cost: Cost


def commands(recipe: Recipe, start: Variant, scrap: str) -> tuple[list[str], list[str]]:
    """The `fairseq-train` command without checkpointing, and with it; `scrap` is the folder for what fairseq leaves."""
    plain = [*recipe.train(Path(scrap), start, cpu=not cuda_is_available()), f"--save-dir={scrap}"]
    return plain, [*plain, "--checkpoint-activations"]


def timed(
    both: Sequence[list[str]], updates: int, rounds: int, say: Callable[[str], object]
) -> tuple[int, list[tuple[float, float]]]:
    """Parameters of the model of two commands, and seconds an update of each, round by round."""
    built = [build_from(command, updates) for command in both]
    model = built[0][0].get_model()
    for trainer, batches in built:
        pass_seconds(trainer, batches[:1])  # makes the optimiser's state
    seconds = []
    for index in range(rounds):
        say(f"round {index + 1} of {rounds}")
        plain, checkpointed = [pass_seconds(trainer, batches) / len(batches) for trainer, batches in built]
        seconds.append((plain, checkpointed))
    return sum(parameter.numel() for parameter in model.parameters()), seconds


def peak_memory(command: list[str], updates: int) -> int:
    """Bytes that this process holds at the peak of some updates, more than before it builds the model."""
    small = [*command, "--encoder-layers=1", "--decoder-layers=1"]
    trainer, batches = build_from(small, updates)
    for _ in range(2):  # the second one alone finds everything loaded
        trainer = trainer_of(small)
        pass_seconds(trainer, batches)
    del trainer
    gc.collect()
    before = held()
    if cuda_is_available():
        torch.cuda.reset_peak_memory_stats()
    pass_seconds(trainer_of(command), [*batches[:1], *batches])  # the first makes the optimiser's state
    return peak() - before


class Laboratory:
    """Measures the points of a study, and keeps what came of each."""

    def __init__(self, size: Size, updates: int, rounds: int, out: Path):
        self.size, self.updates, self.rounds, self.out = size, updates, rounds, out

    def recipe(self, depth: Depth) -> Recipe:
        return self.size.recipe(depth, LR, self.updates, seed=1)

    def file(self, start: Variant, depth: Depth) -> Path:
        """Where the cost of a point is kept."""
        size = self.size
        device = "gpu" if cuda_is_available() else f"{torch.get_num_threads()}-threads"
        subject = f"{size.data}-{size.optimizer}-width{size.width}-{size.max_tokens}-tokens"
        length = f"{self.rounds}x{self.recipe(depth).updates}-updates"
        options = (quote(option, safe="=,") for option in size.extra)
        return Path(self.out, "cost", f"{subject}-{length}-{device}", *options, f"{start.name}-{depth}-layers.json")

    def measure(self, start: Variant, depth: Depth, say: Callable[[str], object]) -> Cost:
        """Measure one point, or read what came of it before; `say` is told how far it is.

        Raises `UserError` where the training overflows or is out of memory.
        """
        file = self.file(start, depth)
        if not file.exists():
            cost = self.measured(start, depth, say)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(cost)) + "\n")
            partial.replace(file)
        return Cost(**json.loads(file.read_text()))

    def measured(self, start: Variant, depth: Depth, say: Callable[[str], object]) -> Cost:
        recipe = self.recipe(depth)
        with TemporaryDirectory() as scrap:
            both = commands(recipe, start, scrap)
            try:
                parameters, seconds = timed(both, recipe.updates, self.rounds, say)
            except (FloatingPointError, StopIteration):  # the latter where fairseq looks for the cause of the former
                raise UserError(f"{start.name} with {depth} layers overflows at once, and has no updates") from None
            except torch.OutOfMemoryError:
                raise UserError(f"{start.name} with {depth} layers is too large for the memory of the GPU") from None
            say("memory")
            plain, checkpointed = (measured_alone(__file__, [str(recipe.updates), *command]) for command in both)
        return Cost(parameters, seconds, (plain, checkpointed))


def check(start: Variant) -> None:
    """Raise `UserError` unless a start is a Transformer with encoder and decoder."""
    from fairseq import utils
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer import TransformerModelBase

    utils.import_user_module(argparse.Namespace(user_dir="user_dir"))
    if "--task=gradinit_translation" in start.options:
        raise UserError("GradInit leaves the updates after it as they are; give the architecture that it starts")
    arch = start.options[0].removeprefix("--arch=")
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), TransformerModelBase):
        raise UserError(f"'{arch}' is no Transformer with encoder and decoder; give one of {ARCH_HELP}")


def row(point: Point) -> list[str]:
    """A line of the table."""
    cost, ratios = point.cost, point.cost.time_ratios
    plain, checkpointed = cost.memory
    return [
        str(point.depth),
        point.start.label,
        f"{cost.parameters / 1e6:.2f}",
        *(f"{cost.median_seconds(checkpointing):.3f}" for checkpointing in (False, True)),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{memory / MIB:.0f}" for memory in cost.memory),
        f"{checkpointed / plain:.2f}",
    ]


def slope_lines(points: Sequence[Point]) -> str:
    """What a further layer of encoder and decoder takes, start by start; of one depth alone, nothing."""
    lines = []
    for start, own in groupby(points, lambda point: point.start):
        costs = {point.depth.layers: point.cost for point in own}
        if len(costs) > 1:
            plain, checkpointed = (
                statistics.linear_regression(list(costs), [cost.memory[index] / MIB for cost in costs.values()]).slope
                for index in (0, 1)
            )
            lines.append(f"- {start.label}: {plain:.2f} MiB, with checkpointing {checkpointed:.2f} MiB")
    header = "Memory that a layer more of encoder and decoder takes, the slope of a straight line over the depths:"
    return "\n".join([header, "", *lines]) if lines else ""


def draw(points: Sequence[Point], out: Path) -> None:
    """Seconds and memory by depth, a colour a start; dashed with checkpointing."""
    with drawing(out, (9.5, 4), columns=2, share_y=False) as panels:
        for index, (start, own) in enumerate(groupby(points, lambda point: point.start)):
            by_depth = sorted(own, key=lambda point: point.depth.layers)
            layers = [point.depth.layers for point in by_depth]
            for checkpointing, style, note in ((False, "o-", ""), (True, "o--", ", checkpointing")):
                seconds = [point.cost.median_seconds(checkpointing) for point in by_depth]
                memory = [point.cost.memory[checkpointing] / MIB for point in by_depth]
                look = {"color": COLOURS[index % len(COLOURS)], "markersize": 4, "label": start.label + note}
                for axes, values in zip(panels, (seconds, memory), strict=True):
                    axes.plot(layers, values, style, **look)
        ticks = {point.depth.layers: str(point.depth) for point in points}
        for axes, what in zip(panels, ("seconds an update", "peak memory of an update (MiB)"), strict=True):
            axes.set(xscale="log", yscale="log", xlabel="layers of encoder and of decoder")
            axes.set_title(what, loc="left", fontsize=11)
            axes.set_xticks(list(ticks), ticks.values())
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
        panels[0].legend(frameon=False)


def cost_study(args: argparse.Namespace) -> str:
    """Measure all points; return the table, and write it and the picture into the folder of the study."""
    exit_on_sigterm()
    torch.set_num_threads(int(environment()["OMP_NUM_THREADS"]))
    lab = Laboratory(size_of(args), args.updates, args.rounds, args.out)
    with quiet():
        for start in args.arch:
            check(start)
        prepare(lab.recipe(args.layers[0]))
        points = measure_all(lab, args.arch, args.layers)
        draw(points, args.out / "cost.png")
    command = shown(["python", "scripts/depth_study.py", *sys.argv[1:]])
    notes = f"- batches of at most {lab.size.max_tokens} tokens; median of {args.rounds} rounds; {MEMORY_NOTE}"
    parts = [
        markdown_table(HEADER, [row(point) for point in sorted(points, key=lambda point: point.depth.layers)]),
        slope_lines(points),
        f"{provenance(command, lab.size.data)}\n{notes}",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (args.out / "cost.md").write_text(text)
    return text


def measure_all(lab: Laboratory, starts: Sequence[Variant], depths: Sequence[Depth]) -> list[Point]:
    """All points, start by start."""
    points = []
    total = len(starts) * sum(depth.layers for depth in depths)
    with tqdm(total=total, desc="cost", unit=" layers") as bar:
        for start in starts:
            for depth in depths:

                def say(state: str, label: str = f"{depth} layers, {start.name}") -> None:
                    bar.set_description_str(f"{label}, {state}")

                points.append(Point(start, depth, lab.measure(start, depth, say)))
                bar.update(depth.layers)
    return points


def count(text: str) -> int:
    """A number of updates or rounds, for argparse."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of 1 or more")
    return int(text)


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--arch", type=listed(start_named), required=True, metavar="A,B,...", help=ARCH_HELP)
    parser.add_argument("--layers", type=listed(depth_named), required=True, metavar="N,N,...", help=LAYERS_HELP)
    parser.add_argument("--updates", type=count, default=5, help="updates of each in a round, after one not counted")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/depth_study"), help="folder for figures and the table")
    add_size_options(parser)
    parser.set_defaults(run=cost_study)


def main() -> None:
    """Print the peak memory of a `fairseq-train` command: `depth_cost.py UPDATES fairseq-train ...`."""
    updates, *command = sys.argv[1:]
    with one_sentence_errors(), quiet():
        print(peak_memory(command, int(updates)))


if __name__ == "__main__":
    main()
