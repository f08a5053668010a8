"""`depth_study.py probe`: signal, gradient and first update of models before training, by depth."""

import argparse
import contextlib
import csv
import dataclasses
import gc
import hashlib
import io
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmark_speed import build_from, trainer_of
from console import UserError, quiet, shown
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
from provenance import markdown_table, provenance
from recipes import Recipe, Variant
from steps import prepare
from torch import Tensor, nn
from tqdm import tqdm
from training_run import cuda_is_available

from coldstart.blocks import find_stacks
from coldstart.depth import verdict
from coldstart.depth_plots import draw_depth
from coldstart.probe import BlockProbe, DepthProbe, probe_depth

if TYPE_CHECKING:
    from fairseq.data import Dictionary

STACKS = ("encoder", "decoder")
QUANTITIES: dict[str, Callable[[DepthProbe], float]] = {
    "signal, encoder": lambda probe: probe.signal["encoder"],
    "signal, decoder": lambda probe: probe.signal["decoder"],
    "gradient norm": lambda probe: probe.gradient_norm,
    "function change": lambda probe: probe.function_change,
    "relative change": lambda probe: probe.relative_change,
    "loss change": lambda probe: probe.updated_loss - probe.loss,
    "kept spread": lambda probe: probe.kept_spread,
}
NUMBERS = (
    *("loss", "updated_loss", "gradient_norm", "output_norm", "function_change", "relative_change"),
    *("output_spread", "updated_spread", "kept_spread"),
)


@dataclass(frozen=True)
class Point:
    """One start at one depth with one seed, and what was measured there."""

    start: Variant
    depth: Depth
    seed: int
    probe: DepthProbe


def probe_point(start: Variant, recipe: Recipe, optimizer: str, lr: float, random_tokens: bool = False) -> DepthProbe:
    """Build a model as `fairseq-train` does, up to its first update, and probe it on its first batch.

    The loss is the run's criterion, mean per token. Checkpointed activations are not: memory is that of a step without.

    Args:
        start: how the model starts; Admin profiles itself, and a GradInit task runs.
        recipe: the training; its data must be there.
        optimizer: "adam" or "sgd", of the step that is probed.
        lr: the learning rate of that step, which may differ from the recipe's.
        random_tokens: probe on a batch of the same shape, whose tokens are drawn at random, with the recipe's seed.

    Raises:
        SystemExit: fairseq-train does not know an option.
        ValueError: the model refuses its options, or `probe_depth` the optimiser or the learning rate.
    """
    with quiet():
        trainer, (batch,) = build_from(command_of(start, recipe), 1)
        from fairseq.modules.checkpoint_activations import unwrap_checkpoint
    if random_tokens:
        task = trainer.task
        batch = with_random_tokens(batch, task.source_dictionary, task.target_dictionary, recipe.seed)
    sample, _ = trainer._prepare_sample(batch)
    criterion = trainer.get_criterion()

    def mean_loss(model: nn.Module, sample: Any) -> Tensor:
        loss, sample_size, _ = criterion(model, sample)
        return loss.squeeze() / sample_size

    # fairseq's kind of checkpoints knows no torch.autograd.grad.
    model = unwrap_checkpoint(trainer.get_model())
    return probe_depth(model, mean_loss, sample, optimizer=optimizer, lr=lr)


def command_of(start: Variant, recipe: Recipe) -> list[str]:
    """The command of a training that writes no log, and leaves no thread behind that prepares its next batches."""
    command = recipe.train(Path("unlogged"), start, cpu=not cuda_is_available())
    return [*(option for option in command if not option.startswith("--log-file=")), "--data-buffer-size=0"]


def with_random_tokens(batch: dict[str, Any], source: "Dictionary", target: "Dictionary", seed: int) -> dict[str, Any]:
    """The batch with other tokens, uniform over the dictionaries; special ones, as padding and ends, stay.

    The decoder's input is still the target, shifted.
    """
    generator = torch.Generator().manual_seed(seed)

    def redrawn(tokens: Tensor, dictionary: "Dictionary") -> Tensor:
        drawn = torch.randint(dictionary.nspecial, len(dictionary), tokens.shape, generator=generator)
        return torch.where(tokens < dictionary.nspecial, tokens, drawn)

    inputs, targets = batch["net_input"], redrawn(batch["target"], target)
    shifted = inputs["prev_output_tokens"].clone()
    shifted[shifted >= target.nspecial] = targets[targets >= target.nspecial]
    tokens = {"src_tokens": redrawn(inputs["src_tokens"], source), "prev_output_tokens": shifted}
    return batch | {"target": targets, "net_input": inputs | tokens}


def check_start(start: Variant, recipe: Recipe) -> None:
    """Raise `UserError` where fairseq-train would refuse the start, or the probe its model; takes a second."""
    said = io.StringIO()
    try:
        with quiet(), contextlib.redirect_stderr(said):
            model = trainer_of(command_of(start, recipe)).get_model()
        stacks = {stack.name for stack in find_stacks(model)}
    except SystemExit:
        sentence, _, choices = said.getvalue().rpartition("error: ")[2].strip().partition(" (choose from ")
        hint = f"; --arch takes {ARCH_HELP}" if choices and "--arch" in sentence else ""
        raise UserError(f"{start.name}: fairseq-train says: {sentence}{hint}") from None
    except (ValueError, AssertionError) as error:
        raise UserError(f"{start.name}: {error}") from None
    if stacks != set(STACKS):
        raise UserError(
            f"{start.name}: the study is of a Transformer with encoder and decoder, not of {sorted(stacks)}"
        )


class Laboratory:
    """Probes the points of a study, and keeps what was measured, a file for each."""

    def __init__(self, size: Size, lr: str, random_tokens: bool, out: Path):
        self.size, self.lr, self.random_tokens, self.out = size, lr, random_tokens, out

    def recipe(self, depth: Depth, seed: int) -> Recipe:
        """The training whose first update is probed."""
        return self.size.recipe(replace(depth, updates=None), self.lr, 1, seed)

    def file(self, start: Variant, depth: Depth, seed: int) -> Path:
        """Where a point is kept: a name that no other point has, whatever becomes of a start of that name."""
        size = self.size
        options = hashlib.sha256(shown([*start.options, *size.extra]).encode()).hexdigest()[:8]
        tokens = f"{'random-' if self.random_tokens else ''}tokens{size.max_tokens}"
        subject = f"{size.data}-{size.optimizer}-lr{float(self.lr)}-width{size.width}-{tokens}"
        return self.out / "probe" / subject / f"{depth}-layers" / f"{start.name}-seed{seed}-{options}.json"

    def kept(self, start: Variant, depth: Depth, seed: int) -> DepthProbe | None:
        """What was measured at a point; None where nothing was, or its file is damaged."""
        file = self.file(start, depth, seed)
        return read_probe(file) if file.exists() else None

    def measure(self, start: Variant, depth: Depth, seed: int) -> DepthProbe:
        """Probe a point and keep what was measured.

        Raises `UserError` where it cannot be built.
        """
        try:
            recipe = self.recipe(depth, seed)
            probe = probe_point(start, recipe, self.size.optimizer, float(self.lr), self.random_tokens)
        except ValueError as error:
            raise UserError(f"{start.name}, {depth} layers: {error}") from None
        write_probe(probe, self.file(start, depth, seed))
        gc.collect()  # the model, which its hooks and fairseq's trainer hold in a circle
        return probe


def write_probe(probe: DepthProbe, file: Path) -> None:
    """Write a measurement as JSON, whole or not at all; infinite and NaN are `Infinity` and `NaN` there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(probe)))
    partial.replace(file)


def read_probe(file: Path) -> DepthProbe | None:
    """A measurement from its JSON file; None where that is damaged."""
    try:
        values = json.loads(file.read_text())
        return DepthProbe(**values | {"blocks": tuple(BlockProbe(**block) for block in values["blocks"])})
    except (ValueError, TypeError, KeyError):
        return None


def probe_points(lab: Laboratory, args: argparse.Namespace) -> list[Point]:
    """All points, the shallow ones first; those that are not kept are measured, once every start is known to be sound.

    Raises `UserError` where a start cannot be built.
    """
    depths = sorted(args.layers, key=lambda depth: depth.layers)
    places = [(start, depth, seed) for depth in depths for start in args.arch for seed in args.seeds]
    kept = {place: lab.kept(*place) for place in places}
    missing = [place for place, probe in kept.items() if probe is None]
    for start in dict.fromkeys(start for start, _, _ in missing):
        check_start(start, lab.recipe(Depth(1, 1), seed=1))
    bar = tqdm(missing, unit=" points")
    for start, depth, seed in bar:
        bar.set_description(f"{depth} layers, {start.name}, seed {seed}")
        kept[start, depth, seed] = lab.measure(start, depth, seed)
    return [Point(*place, probe) for place, probe in kept.items()]


def verdict_cell(points: Sequence[Point], quantity: Callable[[DepthProbe], float]) -> str:
    """What a quantity does with depth, over depths and seeds; `-` where the points are too few."""
    depths = [point.depth.encoder for point in points]
    if len(depths) < 3 or len(set(depths)) < 2:
        return "-"
    return str(verdict(depths, [abs(quantity(point.probe)) for point in points]))


def median_cell(points: Sequence[Point], quantity: Callable[[DepthProbe], float]) -> str:
    """The median over seeds, where an overflow is infinite."""
    values = [quantity(point.probe) for point in points]
    return f"{statistics.median(math.inf if math.isnan(value) else value for value in values):.3g}"


def by_start(points: Sequence[Point]) -> dict[Variant, list[Point]]:
    """The points of each start."""
    starts = dict.fromkeys(point.start for point in points)
    return {start: [point for point in points if point.start == start] for start in starts}


def even(points: Sequence[Point]) -> list[Point]:
    """The points whose encoder and decoder are of one depth N, over which a power of N is fitted."""
    return [point for point in points if point.depth.encoder == point.depth.decoder]


def verdict_table(points: Sequence[Point]) -> str:
    """A line for each start: what its quantities do with depth."""
    rows = [
        [start.label, *(verdict_cell(even(own), quantity) for quantity in QUANTITIES.values())]
        for start, own in by_start(points).items()
    ]
    return markdown_table(["start", *QUANTITIES], rows)


def value_table(points: Sequence[Point]) -> str:
    """A line for each start and depth: the quantities themselves."""
    rows = []
    for start, own in by_start(points).items():
        for depth in dict.fromkeys(point.depth for point in own):
            seeds = [point for point in own if point.depth == depth]
            rows.append([start.label, str(depth), *(median_cell(seeds, value) for value in QUANTITIES.values())])
    return markdown_table(["start", "layers", *QUANTITIES], rows)


def write_csv(points: Sequence[Point], size: Size, lr: str, file: Path) -> None:
    """A line for each point."""
    header = ["start", "encoder_layers", "decoder_layers", "seed", "optimizer", "lr", *NUMBERS]
    with file.open("w", newline="") as output:
        writer = csv.writer(output)
        writer.writerow([*header, *(f"signal_{stack}" for stack in STACKS)])
        for point in points:
            place = (point.start.name, point.depth.encoder, point.depth.decoder, point.seed, size.optimizer, lr)
            numbers = (getattr(point.probe, number) for number in NUMBERS)
            writer.writerow([*place, *numbers, *(point.probe.signal[stack] for stack in STACKS)])


def draw(points: Sequence[Point], title: str, file: Path) -> None:
    """The picture of :func:`coldstart.depth_plots.draw_depth`."""
    measured = {
        start.label: [(point.depth.encoder, point.probe) for point in own] for start, own in by_start(points).items()
    }
    try:
        draw_depth(measured, title).savefig(file)
    except ImportError as error:
        raise UserError(str(error)) from None


def probe_study(args: argparse.Namespace) -> str:
    """Probe all points; return the tables, and write them, the CSV and the picture into the folder of the study."""
    lab = Laboratory(size_of(args), args.lr, args.random_data, args.out)
    size = lab.size
    prepare(lab.recipe(args.layers[0], args.seeds[0]))
    points = probe_points(lab, args)
    data = f"{size.data}, random tokens" if args.random_data else size.data
    step = f"{size.optimizer}, learning rate {args.lr}"
    write_csv(points, size, args.lr, args.out / f"{args.name}.csv")
    if even(points):
        draw(even(points), f"{data}, width {size.width}, {step}", args.out / f"{args.name}.png")
    left_out = "" if len(even(points)) == len(points) else " where encoder and decoder are equally deep"
    text = "\n".join(
        [
            f"{verdict_table(points)}\n\n{value_table(points)}\n",
            provenance(shown(["python", "scripts/depth_study.py", *sys.argv[1:]]), data),
            f"- before training, first update of {step}; seeds {', '.join(map(str, args.seeds))}",
            f"- exponents of N over all depths and seeds{left_out}, of the loss by the size of its change; "
            "values are medians over seeds\n",
        ]
    )
    (args.out / f"{args.name}.md").write_text(text)
    return text


def file_name(text: str) -> str:
    """A name that files can have, for argparse."""
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"'{text}' is no name of a file without its folder")
    return text


def add_probe_options(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--arch", type=listed(start_named), required=True, metavar="A,B,...", help=ARCH_HELP)
    parser.add_argument("--layers", type=listed(depth_named), required=True, metavar="N,N,...", help=LAYERS_HELP)
    parser.add_argument("--lr", type=positive, default="1e-3", help="of the first update; default: 1e-3")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3], metavar="SEED,SEED,...")
    parser.add_argument("--random-data", action="store_true", help="a batch of that shape, but random tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/depth_study"), help="folder for points and tables")
    parser.add_argument("--name", type=file_name, default="probe", help="of the tables and the picture in that folder")
    add_size_options(parser)
    parser.set_defaults(run=probe_study)
