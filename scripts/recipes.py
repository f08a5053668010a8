"""The commands of the recipes, in one place: the quickstart runs them, the examples' READMEs show them, and
`tests/scripts` holds the two together."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Options = tuple[str, ...]

ADAM = ("--optimizer=adam", "--adam-betas=(0.9, 0.98)")

# By default fairseq drops the last batch of a data set, also of a test set, unless its size is a multiple of 8.
EVERY_SENTENCE = ("--required-batch-size-multiple=1",)


def model_options(width: int, feed_forward: int, heads: int, encoder_layers: int, decoder_layers: int) -> Options:
    """fairseq's options for the size of a Transformer with encoder and decoder of one width."""
    sides = (("encoder", encoder_layers), ("decoder", decoder_layers))
    return tuple(
        option
        for side, layers in sides
        for option in (
            f"--{side}-layers={layers}",
            f"--{side}-embed-dim={width}",
            f"--{side}-ffn-embed-dim={feed_forward}",
            f"--{side}-attention-heads={heads}",
        )
    )


def smoothed(dropout: float, max_tokens: int) -> Options:
    """Label-smoothed training with batches of at most `max_tokens` tokens on either side."""
    criterion = ("--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1")
    return (*criterion, f"--dropout={dropout:g}", f"--max-tokens={max_tokens}", "--num-workers=0")


def unsmoothed(dropout: float, max_tokens: int) -> Options:
    """Training on the plain likelihood with batches of at most `max_tokens` tokens."""
    return ("--criterion=cross_entropy", f"--dropout={dropout:g}", f"--max-tokens={max_tokens}", "--num-workers=0")


@dataclass(frozen=True)
class Variant:
    """One way to start a Transformer: its architecture and what it does with the learning rate at first."""

    name: str
    label: str
    options: Options
    warmup: bool = False


T_FIXUP = Variant("tfixup", "T-Fixup, no warmup", ("--arch=transformer_tfixup",))
POST_LN = Variant("post_ln", "Post-LN, no warmup", ("--arch=transformer",))
POST_LN_WARMUP = Variant("post_ln_warmup", "Post-LN, warmup", ("--arch=transformer",), warmup=True)
PRE_LN = Variant(
    "pre_ln",
    "Pre-LN, no warmup",
    ("--arch=transformer", "--encoder-normalize-before", "--decoder-normalize-before"),
)
VARIANTS = (POST_LN, POST_LN_WARMUP, PRE_LN, T_FIXUP)

# One architecture for both, so that nothing but the initial self-attention differs.
MIMETIC_LM = Variant("mimetic", "mimetic", ("--arch=transformer_lm_mimetic",))
PLAIN_LM = Variant("plain", "plain", (*MIMETIC_LM.options, "--mimetic-qk=none", "--mimetic-vo=none"))


@dataclass(frozen=True)
class Recipe:
    """What it takes to train and use a model on one data set.

    Attributes:
        name: what the quickstart calls it; results go to `runs/{name}`.
        task: what the model does: spelling to phones, translation, or to predict text; says how it is scored.
        data: the folder that `fairseq-preprocess` made; of a language model, the folder of its text.
        model: size and sharing, for either architecture.
        lr: the learning rate at the first update.
        decay_period: how fast it falls: `inverse_sqrt_nowarmup`'s P; 0 for a constant rate; None for a straight line
            to zero at the last update.
        warmup_updates: updates of warmup of the variants that have one.
        updates: length of the training.
        save_every: updates from one checkpoint and validation to the next; 0 for neither.
        log_every: updates from one line of the log to the next.
        training: batch size, regularisation and the like.
        seed: of the weights, the order of the data and dropout.
        decoding: how tokens become text, for generation; of a language model, how it reads the test set.
        beam: beam size and length penalty.
        optimizer: the optimiser and its moments.
    """

    name: str
    task: Literal["g2p", "translation", "language_model"]
    data: Path
    model: Options
    lr: str
    decay_period: int | None
    warmup_updates: int
    updates: int
    save_every: int
    log_every: int
    training: Options
    decoding: Options = ()
    beam: Options = ("--beam=5",)
    optimizer: Options = ADAM
    seed: int = 1

    def schedule(self, variant: Variant) -> Options:
        """The learning-rate options of a variant."""
        warmup = (f"--warmup-updates={self.warmup_updates}",) if variant.warmup else ()
        if self.decay_period is None:
            return ("--lr-scheduler=polynomial_decay", f"--total-num-update={self.updates}", *warmup)
        if variant.warmup:
            return ("--lr-scheduler=inverse_sqrt", *warmup)
        if not self.decay_period:
            return ("--lr-scheduler=fixed",)
        return ("--lr-scheduler=inverse_sqrt_nowarmup", f"--decay-period={self.decay_period}")

    def saving(self, run: Path) -> Options:
        """The options for checkpoints and validation."""
        if not self.save_every:
            return ("--no-save", "--disable-validation")
        interval = (f"--save-interval-updates={self.save_every}", "--keep-interval-updates=1")
        return (f"--save-dir={run / 'checkpoints'}", *interval, "--no-epoch-checkpoints")

    def train(self, run: Path, variant: Variant = T_FIXUP, cpu: bool = True) -> list[str]:
        """The `fairseq-train` command whose checkpoints and log go to the folder `run`."""
        return [
            *("fairseq-train", str(self.data), "--user-dir=user_dir", *variant.options, *self.model),
            *(*self.optimizer, f"--lr={self.lr}", *self.schedule(variant)),
            *(*self.training, *EVERY_SENTENCE, f"--max-update={self.updates}", f"--seed={self.seed}"),
            *self.saving(run),
            *("--log-format=json", f"--log-interval={self.log_every}", f"--log-file={run / 'log.jsonl'}"),
            *device(cpu),
        ]

    def _model(self, command: str, run: Path, cpu: bool) -> list[str]:
        checkpoint = run / "checkpoints" / "checkpoint_best.pt"
        options = ("--user-dir=user_dir", f"--path={checkpoint}", *self.beam, *self.decoding)
        return [command, str(self.data), *options, *device(cpu)]

    def generate(self, run: Path, cpu: bool = True) -> list[str]:
        """The `fairseq-generate` command for the test set; its output goes to `{run}/generate-test.txt`."""
        batch = ("--max-tokens=4096", *EVERY_SENTENCE, f"--results-path={run}")
        return [*self._model("fairseq-generate", run, cpu), *batch]

    def evaluate(self, run: Path, cpu: bool = True) -> list[str]:
        """The `fairseq-eval-lm` command for the test set."""
        checkpoint = run / "checkpoints" / "checkpoint_best.pt"
        model = (f"--path={checkpoint}", "--gen-subset=test", *self.decoding)
        return ["fairseq-eval-lm", str(self.data), "--user-dir=user_dir", *model, *device(cpu)]

    def interactive(self, run: Path, cpu: bool = True) -> list[str]:
        """The `fairseq-interactive` command, which reads sentences from its standard input."""
        return self._model("fairseq-interactive", run, cpu)

    def shortened(self, updates: int | None) -> "Recipe":
        """The same recipe with another number of updates."""
        if updates is None:
            return self
        save_every, log_every = (min(interval, updates) for interval in (self.save_every, self.log_every))
        return replace(self, updates=updates, save_every=save_every, log_every=log_every)


def device(cpu: bool) -> Options:
    """Options for one process: on the CPU, or on one GPU."""
    return ("--cpu",) if cpu else ("--distributed-world-size=1",)


G2P = Recipe(
    name="g2p",
    task="g2p",
    data=Path("data-bin/cmudict"),
    model=(*model_options(128, 512, 4, 3, 3), "--share-decoder-input-output-embed"),
    lr="2e-3",
    decay_period=None,
    warmup_updates=400,
    updates=5000,
    save_every=500,
    log_every=20,
    training=smoothed(dropout=0, max_tokens=1024),
)

G2P_FULL = replace(
    G2P,
    name="g2p_full",
    model=(*model_options(256, 1024, 4, 3, 3), "--share-decoder-input-output-embed"),
    lr="1.5e-3",
    updates=12000,
    save_every=1000,
    training=smoothed(dropout=0.1, max_tokens=1024),
)

MULTI30K = Recipe(
    name="multi30k",
    task="translation",
    data=Path("data-bin/multi30k"),
    model=(*model_options(256, 512, 4, 3, 3), "--share-all-embeddings"),
    lr="1.5e-3",
    decay_period=None,
    warmup_updates=400,
    updates=5000,
    save_every=500,
    log_every=20,
    training=smoothed(dropout=0.2, max_tokens=1024),
    decoding=("--bpe=sentencepiece", "--sentencepiece-model=data-bin/multi30k/spm.model"),
)

MULTI30K_SMALL = replace(
    MULTI30K,
    name="multi30k_small",
    model=(*model_options(96, 192, 4, 6, 6), "--share-all-embeddings"),
    lr="2e-3",
    updates=1200,
    save_every=200,
    training=smoothed(dropout=0.1, max_tokens=1024),
)


def text_at(level: str, length: int) -> Options:
    """The text as one stream of words or characters, cut into samples of `length`."""
    return ("--task=wikitext_language_modeling", f"--level={level}", f"--tokens-per-sample={length}")


def decoder_options(width: int, feed_forward: int, heads: int, layers: int) -> Options:
    """fairseq's options for the size of a tied Pre-LN language model."""
    _, _, _, _, *decoder = model_options(width, feed_forward, heads, layers, layers)
    return (*decoder, "--decoder-normalize-before", "--share-decoder-input-output-embed")


BROWN = Recipe(
    name="brown",
    task="language_model",
    data=Path("data/brown"),
    model=decoder_options(width=128, feed_forward=512, heads=4, layers=4),
    lr="2e-3",
    decay_period=None,
    warmup_updates=100,
    updates=1000,
    save_every=100,
    log_every=20,
    training=(*text_at("word", 128), *unsmoothed(dropout=0.1, max_tokens=1024)),
    decoding=(*text_at("word", 128), "--context-window=64", "--max-tokens=1024"),
)

BROWN_CHARACTERS = replace(
    BROWN,
    name="brown_characters",
    model=decoder_options(width=96, feed_forward=384, heads=4, layers=6),
    training=(*text_at("char", 256), *unsmoothed(dropout=0.1, max_tokens=2048)),
    decoding=(*text_at("char", 256), "--context-window=128", "--max-tokens=2048"),
)

RECIPES = {recipe.name: recipe for recipe in (G2P, G2P_FULL, MULTI30K, MULTI30K_SMALL, BROWN, BROWN_CHARACTERS)}
