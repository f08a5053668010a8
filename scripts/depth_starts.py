"""What the depth study compares: the starts by name, depths, and the small Transformer that they start."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from recipes import ADAM, G2P, MULTI30K, POST_LN, POST_LN_WARMUP, PRE_LN, Options, Recipe, Variant, model_options

Value = TypeVar("Value")

DATA = {"cmudict": G2P, "multi30k": MULTI30K}
OPTIMIZERS = {"adam": ADAM, "sgd": ("--optimizer=sgd", "--momentum=0.9")}


def with_warmup(start: Variant) -> Variant:
    """The same start with warmup."""
    label = start.label.replace(", no warmup", "") + ", warmup"
    return replace(start, name=f"{start.name}_warmup", label=label, warmup=True)


T_FIXUP = Variant("tfixup", "T-Fixup", ("--arch=transformer_tfixup",))
T_FIXUP_ADAM = Variant("tfixup_adam", "T-Fixup, Adam's law", (*T_FIXUP.options, "--tfixup-law=adam"))
ADMIN = Variant("admin", "Admin", ("--arch=transformer_admin",))
DEEPNORM = Variant("deepnorm", "DeepNorm", ("--arch=transformer_deepnorm",))
XAVIER = Variant("xavier", "Xavier, no LayerNorm", (*T_FIXUP.options, "--tfixup-law=none"))
GRADINIT = Variant(
    "gradinit",
    "Post-LN, GradInit",
    (*POST_LN.options, "--task=gradinit_translation", "--gradinit-iterations=100"),
)
MIMETIC = Variant("mimetic", "Post-LN, mimetic", ("--arch=transformer_mimetic",))
STARTS = {
    start.name: start
    for start in (
        replace(POST_LN, label="Post-LN"),
        POST_LN_WARMUP,
        replace(PRE_LN, label="Pre-LN"),
        T_FIXUP,
        T_FIXUP_ADAM,
        ADMIN,
        with_warmup(ADMIN),
        DEEPNORM,
        with_warmup(DEEPNORM),
        MIMETIC,
        with_warmup(MIMETIC),
        XAVIER,
        GRADINIT,
    )
}


def start_named(name: str) -> Variant:
    """A start of this study, or else any architecture of fairseq or the plugin, without warmup."""
    return STARTS.get(name) or Variant(name, name, (f"--arch={name}",))


@dataclass(frozen=True)
class Depth:
    """Layers of encoder and decoder, and how long to train them where that is not as long as the others.

    Shown as people write it: `6` for 6+6, `40+6`.
    """

    encoder: int
    decoder: int
    updates: int | None = None

    def __str__(self) -> str:
        return str(self.encoder) if self.encoder == self.decoder else f"{self.encoder}+{self.decoder}"

    @property
    def layers(self) -> float:
        """N: the layers of a stack, on average."""
        return (self.encoder + self.decoder) / 2


def depth_named(text: str) -> Depth:
    """`6`, `40+6`, or `200:100` for 100 updates of 200 layers, for argparse."""
    match = re.fullmatch(r"([1-9]\d*)(?:\+([1-9]\d*))?(?::([1-9]\d*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no depth: give 6 for 6+6 layers, 40+6 for encoder+decoder, 200:100 to train 100 updates"
        )
    encoder, decoder, updates = match.groups()
    return Depth(int(encoder), int(decoder or encoder), int(updates) if updates else None)


def listed(parse: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A list between commas, for argparse."""

    def parse_all(text: str) -> list[Value]:
        try:
            return list(dict.fromkeys(parse(item) for item in text.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no list of values between commas") from None

    return parse_all


def positive(text: str) -> str:
    """A learning rate as it was written, for argparse."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return text


ARCH_HELP = f"{', '.join(STARTS)}, or any --arch of fairseq-train"
LAYERS_HELP = "depths: 6 for 6+6 layers, 40+6 for encoder and decoder"


@dataclass(frozen=True)
class Size:
    """The Transformer of the study but for its depth, and its batches."""

    data: str = "cmudict"
    width: int = 64
    max_tokens: int = 512
    optimizer: str = "adam"
    extra: Options = ()

    def recipe(self, depth: Depth, lr: str, updates: int, seed: int) -> Recipe:
        """A short training to a learning rate of zero, every update logged; no dropout, smoothing or checkpoints.

        Half of the updates are warmup, for a start that has one: the best length at 6+6 layers in the study `warmup`
        of `compare_gradinit.py`.
        """
        base, updates = DATA[self.data], depth.updates or updates
        return replace(
            base,
            model=(*model_options(self.width, 2 * self.width, 4, depth.encoder, depth.decoder), base.model[-1]),
            optimizer=OPTIMIZERS[self.optimizer],
            lr=lr,
            decay_period=None,
            warmup_updates=updates // 2,
            updates=updates,
            save_every=0,
            log_every=1,
            training=(
                *("--criterion=cross_entropy", "--dropout=0", f"--max-tokens={self.max_tokens}", "--num-workers=0"),
                *self.extra,
            ),
            seed=seed,
        )


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """The options of :class:`Size`."""
    parser.add_argument("--data", choices=DATA, default="cmudict")
    parser.add_argument("--width", type=int, default=64, help="of the stream; feed-forward blocks have twice that")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens a batch")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("extra", nargs="*", metavar="-- OPTION", help="options of fairseq-train for all, after --")


def size_of(args: argparse.Namespace) -> Size:
    """The size that was asked for."""
    return Size(args.data, args.width, args.max_tokens, args.optimizer, tuple(args.extra))
