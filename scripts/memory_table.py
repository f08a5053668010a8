"""Parameters and memory of a training by depth and width, computed before there is a machine for it.

    python scripts/memory_table.py --layers 6,50,200 --sizes 64-128-2,512-2048-8 --precision bf16
    python scripts/memory_table.py --layers 6,12 --sizes 64-128-2 --measure

fairseq builds small models of each size, of one and two layers, and makes one pass through each; parameters and what
the pass keeps for the gradient grow by the same for every further layer. `--measure` runs real updates beside it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from benchmark_speed import build_from
from console import one_sentence_errors, quiet, shown
from depth_starts import LAYERS_HELP, Depth, depth_named, listed
from memory import measured_alone
from provenance import markdown_table, provenance
from recipes import ADAM, model_options
from torch import nn
from tqdm import tqdm

GIB = 2**30


@dataclass(frozen=True)
class Bytes:
    """What each parameter takes, in bytes.

    Attributes:
        weights: of the model and, in mixed precision, their float32 masters with a gradient each.
        gradients: made anew in each pass, while what was kept for them is let go.
        moments: Adam's, which `--zero-sharding os` divides among the processes.
    """

    weights: int
    gradients: int
    moments: int = 8


PRECISIONS = {"fp32": Bytes(4, 4), "fp16": Bytes(2 + 4 + 4, 2), "bf16": Bytes(2 + 4 + 4, 2)}


@dataclass(frozen=True)
class Size:
    """Width, feed-forward width and heads of either side."""

    width: int
    inner: int
    heads: int

    def __str__(self) -> str:
        return f"{self.width}-{self.inner}-{self.heads}"


@dataclass(frozen=True)
class Footprint:
    """What a model takes, by depth: whatever is measured at 1+1 layers, and what a layer of either side adds.

    Attributes:
        base: at one layer of encoder and one of decoder.
        encoder: more for each further layer of the encoder.
        decoder: the same of the decoder.
    """

    base: int
    encoder: int
    decoder: int

    def at(self, depth: Depth) -> int:
        """The value at a depth."""
        return self.base + (depth.encoder - 1) * self.encoder + (depth.decoder - 1) * self.decoder


@dataclass(frozen=True)
class Plan:
    """What a training of one size takes.

    Attributes:
        parameters: how many the model has.
        kept: bytes that the pass keeps for the gradient.
        checkpointed: the same with `--checkpoint-activations`.
        logits: bytes of the logits of a batch, in float32, as the loss takes them.
    """

    parameters: Footprint
    kept: Footprint
    checkpointed: Footprint
    logits: int

    def peak(self, depth: Depth, precision: str, checkpointing: bool = False, processes: int = 1) -> float:
        """Bytes at the peak of an update.

        That is weights and moments, and the greater of all gradients, which are there when the pass back ends, and of
        what it finds when it begins: all that was kept, and the gradient of the logits, before the softmax and behind
        it. Checkpointing makes one layer anew at a time, at most as large as one of the decoder.
        """
        each, parameters = PRECISIONS[precision], self.parameters.at(depth)
        kept, passing = self.kept.at(depth), 2 * self.logits
        if checkpointing:
            kept, passing = self.checkpointed.at(depth), max(passing, self.kept.decoder)
        lasting = parameters * (each.weights + each.moments / processes)
        return lasting + max(kept + passing, parameters * each.gradients)


def command_of(size: Size, depth: Depth, args: argparse.Namespace, checkpointing: bool = False) -> list[str]:
    """A `fairseq-train` command on batches of made-up sentences, all equally long."""
    batch = (f"--src-len={args.length}", f"--tgt-len={args.length}", f"--max-tokens={args.max_tokens}")
    return [
        *("fairseq-train", "--task=dummy_mt", f"--dict-size={args.vocabulary}", "--dataset-size=100000", *batch),
        *("--user-dir=user_dir", f"--arch={args.arch}", "--share-all-embeddings"),
        *model_options(size.width, size.inner, size.heads, depth.encoder, depth.decoder),
        *(*ADAM, "--lr=1e-6", "--lr-scheduler=fixed", "--criterion=label_smoothed_cross_entropy"),
        *("--label-smoothing=0.1", "--dropout=0.1", "--no-save", "--disable-validation", "--cpu"),
        *([] if args.precision == "fp32" else [f"--{args.precision}"]),
        *(["--checkpoint-activations"] if checkpointing else []),
    ]


def kept_bytes(model: nn.Module, criterion: nn.Module, sample: dict) -> int:
    """Bytes of the tensors that a pass keeps for the gradient, other than the model's own; views count once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = criterion(model, sample)[0]  # it holds what was kept, so that no address is used twice
        total = sum(kept.values())
    del loss
    return total


def footprints(size: Size, args: argparse.Namespace, checkpointing: bool) -> tuple[Footprint, Footprint]:
    """Parameters, and bytes kept by a pass."""
    found = []
    for depth in (Depth(1, 1), Depth(2, 1), Depth(1, 2)):
        trainer, (batch,) = build_from(command_of(size, depth, args, checkpointing), 1)
        sample, _ = trainer._prepare_sample(batch)
        model = trainer.model.train()
        kept = kept_bytes(model, trainer.criterion, sample)
        found.append((sum(parameter.numel() for parameter in model.parameters()), kept))
    return tuple(Footprint(base, more - base, deeper - base) for base, more, deeper in zip(*found, strict=True))


def plan_of(size: Size, args: argparse.Namespace) -> Plan:
    """What a training of this size takes at any depth."""
    parameters, kept = footprints(size, args, checkpointing=False)
    logits = 4 * args.max_tokens * args.vocabulary
    return Plan(parameters, kept, footprints(size, args, checkpointing=True)[1], logits)


def gib(count: float) -> str:
    """Bytes in GiB, to three digits."""
    return f"{count / GIB:#.3g}".rstrip(".")


def row(size: Size, depth: Depth, plan: Plan, args: argparse.Namespace) -> list[str]:
    """A line of the table."""
    peaks = [plan.peak(depth, args.precision, checkpointing) for checkpointing in (False, True)]
    measured = []
    if args.measure:
        commands = [command_of(size, depth, args, checkpointing) for checkpointing in (False, True)]
        measured = [gib(measured_alone("scripts/depth_cost.py", ["2", *command])) for command in commands]
    return [
        *(str(depth), str(size), f"{plan.parameters.at(depth) / 1e6:.2f}"),
        *(gib(kept.at(depth)) for kept in (plan.kept, plan.checkpointed)),
        *map(gib, peaks),
        gib(plan.peak(depth, args.precision, True, args.processes)),
        *measured,
    ]


def size_named(text: str) -> Size:
    """`512-2048-8`, for argparse."""
    try:
        size = Size(*map(int, text.split("-")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"'{text}' is no size: give width-inner-heads, as 512-2048-8") from None
    if min(size.width, size.inner, size.heads) < 1 or size.width % (2 * size.heads):
        raise argparse.ArgumentTypeError(f"'{text}' is no size: the heads must divide the width, which is even")
    return size


def positive(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of 1 or more")
    return int(text)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Parameters and memory of a training by depth and width.")
    parser.add_argument("--layers", type=listed(depth_named), required=True, metavar="N,N,...", help=LAYERS_HELP)
    parser.add_argument(
        "--sizes", type=listed(size_named), required=True, metavar="W-F-H,...", help="width-inner-heads, as 512-2048-8"
    )
    parser.add_argument("--arch", default="transformer_tfixup", help="a Transformer of fairseq or the plugin")
    parser.add_argument("--vocabulary", type=positive, default=10_000, help="words of the joint dictionary")
    parser.add_argument("--max-tokens", type=positive, default=4000, help="tokens of a batch on either side")
    parser.add_argument("--length", type=positive, default=25, help="tokens of a sentence")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--processes", type=positive, default=8, help="that share Adam's moments by --zero-sharding os")
    parser.add_argument("--measure", action="store_true", help="run two updates of each, and show their peaks beside")
    return parser.parse_args(arguments)


def table(args: argparse.Namespace) -> str:
    """The table in Markdown; memory in GiB."""
    header = [
        *("layers", "size", "million parameters", "kept for the gradient", "checkpointing"),
        *("peak", "checkpointing", f"... and {args.processes} processes"),
        *(("measured peak", "checkpointing") if args.measure else ()),
    ]
    rows = []
    with quiet():
        plans = {size: plan_of(size, args) for size in tqdm(args.sizes, desc="sizes")}
        pairs = tqdm(list(product(args.sizes, args.layers)), desc="measured" if args.measure else "depths")
        rows = [row(size, depth, plans[size], args) for size, depth in pairs]
    return markdown_table(header, rows)


def main() -> None:
    args = parse_args()
    with one_sentence_errors():
        text = table(args)
        command = shown(["python", "scripts/memory_table.py", *sys.argv[1:]])
        print(f"\nGiB; each process, with a batch of {args.max_tokens} tokens, {args.precision}\n\n{text}\n")
        print(provenance(command, f"made-up sentences of {args.length} tokens, {args.vocabulary} words"))


if __name__ == "__main__":
    main()
