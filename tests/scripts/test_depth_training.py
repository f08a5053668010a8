"""`depth_study.py train`: its points, what is made of them, and real trainings in small."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import depth_training
import pytest
from depth_starts import DATA, STARTS, Depth, Size, depth_named, listed, positive, start_named
from depth_training import Cell, Laboratory, Outcome
from recipes import Variant
from training_log import TrainingLog

ROOT = Path(__file__).parents[2]
SIX, DEEP = Depth(6, 6), Depth(50, 50)
PLAIN, WARM = STARTS["post_ln"], STARTS["post_ln_warmup"]


def falling(last: float, updates: int = 20, diverged_at: int | None = None) -> Outcome:
    """A loss that falls in a straight line from 6, a second an update."""
    losses = tuple(6 + (last - 6) * update / updates for update in range(1, updates + 1))
    return Outcome(losses, tuple(map(float, range(updates))), diverged_at)


@pytest.mark.parametrize(
    ("text", "depth", "shown", "layers"),
    [
        ("6", Depth(6, 6), "6", 6),
        ("40+6", Depth(40, 6), "40+6", 23),
        ("200:100", Depth(200, 200, 100), "200", 200),
        ("7+7", Depth(7, 7), "7", 7),
    ],
)
def test_depths(text, depth, shown, layers):
    assert depth_named(text) == depth
    assert (str(depth), depth.layers) == (shown, layers)


@pytest.mark.parametrize("text", ["0", "6+", "+6", "6:0", "six", "6+0", ""])
def test_what_is_no_depth(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no depth: give 6 for 6\+6 layers"):
        depth_named(text)


@pytest.mark.parametrize("text", ["1e-3,0", "-1", "nan", "inf", "a", "1,,2"])
def test_what_is_no_learning_rate(text):
    with pytest.raises(argparse.ArgumentTypeError, match="between commas"):
        listed(positive)(text)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fairseq_accepts_every_start(name, optimizer, plugin):
    from fairseq import options

    recipe = Size(optimizer=optimizer, extra=("--checkpoint-activations",)).recipe(Depth(3, 2), "1e-2", 40, 7)
    command = recipe.train(Path("run"), STARTS[name])
    args = options.parse_args_and_arch(options.get_training_parser(), command[1:])
    assert (args.encoder_layers, args.decoder_layers, args.seed, args.max_update) == (3, 2, 7, 40)
    assert (args.warmup_updates == 20) == STARTS[name].warmup
    assert args.checkpoint_activations


def test_any_architecture_is_a_start():
    assert start_named("transformer_tfixup_200l").options == ("--arch=transformer_tfixup_200l",)
    assert start_named("tfixup") is STARTS["tfixup"]


def test_an_outcome():
    outcome = falling(2.0)
    assert outcome.loss == pytest.approx(6 - 4 * 15.5 / 20)  # updates 11 to 20
    assert outcome.reaches(outcome.loss) == 20
    assert outcome.reaches(outcome.smooth[14]) == 15
    assert outcome.reaches(1.0) is None
    assert Outcome((5.0,), (0.0,), diverged_at=2).loss == math.inf


def test_a_log_without_an_update_diverged_at_the_first():
    assert depth_training.outcome_of(TrainingLog(), diverged=True).diverged_at == 1
    log = TrainingLog(train={1: {"loss": 5.0, "wall": 3.0}, 2: {"loss": 6.0, "wall": 4.0}})
    assert depth_training.outcome_of(log, diverged=True) == Outcome((5.0, 6.0), (0.0, 1.0), 3)


def test_learning_rates_fall_with_the_square_root_of_depth():
    assert depth_training.scaled("4e-3", 18, 50) == "0.0024"
    assert float(depth_training.scaled("1e-3", 6, 24)) == pytest.approx(5e-4)


class Remembering(Laboratory):
    """A laboratory that trains nothing: the loss is known."""

    def __init__(self):
        super().__init__(Size(), 300, Path("runs"))
        self.points: list[tuple[str, str, int]] = []

    def measure(self, start: Variant, depth: Depth, lr: str, seed: int) -> Outcome:
        self.points.append((str(depth), lr, seed))
        return falling(abs(math.log2(float(lr) * depth.layers / 6e-3)))  # best at 6e-3 / N


def test_shallow_depths_choose_the_rate_of_deep_ones():
    args = argparse.Namespace(layers=[DEEP, SIX, Depth(12, 12)], lrs=["5e-4", "1e-3", "2e-3"], tune=12.0, seeds=[3, 4])
    lab = Remembering()
    cells = depth_training.train_start(lab, PLAIN, args)
    assert [(str(cell.depth), cell.best_rate) for cell in cells] == [("6", "1e-3"), ("12", "5e-4"), ("50", "0.00024")]
    tuning = [(depth, lr, 3) for depth in ("6", "12") for lr in args.lrs]
    others = [("6", "1e-3", 4), ("12", "5e-4", 4), ("50", "0.00024", 3), ("50", "0.00024", 4)]
    assert sorted(lab.points) == sorted(tuning + others)


def test_the_table():
    cells = [
        Cell(PLAIN, SIX, {("1e-3", 1): falling(2.0), ("1e-3", 2): falling(1.0), ("4e-3", 1): falling(5.5)}),
        Cell(WARM, SIX, {("1e-3", 1): falling(3.0), ("1e-3", 2): falling(3.0)}),
        Cell(PLAIN, DEEP, {("1e-3", 1): falling(4.0, diverged_at=21), ("1e-3", 2): falling(4.0)}),
        Cell(WARM, DEEP, {("1e-3", 1): falling(5.9), ("1e-3", 2): falling(5.9)}),
    ]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in depth_training.table(cells, 5).split("\n")
    ]
    assert "Post-LN, warmup" in table[0][5]
    rows = {(row[0], row[1]): row[2:] for row in table[2:]}
    assert rows["6", "Post-LN"] == ["1e-3", "2.513 ± 0.548", "trained", "16", "14", "19"]
    assert rows["6", "Post-LN, warmup"][3] == "20"
    assert rows["50", "Post-LN"] == ["1e-3", "4.450", "1 of 2 diverged, update 21", "-", "-", "19"]
    assert rows["50", "Post-LN, warmup"][2] == "2 of 2 stalled"
    rates = depth_training.rate_table(cells)
    assert "| Post-LN | 6 | 2.90 | 5.61 |" in rates
    assert "warmup" not in rates, "one rate is no map"


def test_entropy_counts_the_ends_of_lines(tmp_path):
    (tmp_path / "text").write_text("a b\nb a\n")  # a, b, end: twice each
    assert depth_training.entropy(tmp_path / "text") == pytest.approx(math.log2(3))


@pytest.fixture
def small(reversal_data, monkeypatch):
    """The data set "cmudict" is one of reversed words, whose text says how frequent letters are."""
    monkeypatch.chdir(ROOT)
    recipe = DATA["cmudict"]
    monkeypatch.setitem(DATA, "cmudict", replace(recipe, data=reversal_data))
    monkeypatch.setitem(depth_training.TARGET_TEXT, "cmudict", "../train.tgt")
    monkeypatch.setattr(depth_training, "prepare", lambda recipe: None)


def arguments(out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    depth_training.add_train_options(parser)
    size = ("--width=16", "--max-tokens=64", "--updates=12", f"--out={out}")
    return parser.parse_args(["--arch=tfixup,post_ln_warmup", "--layers=1", *size, *more])


def test_trainings_in_small(small, tmp_path, monkeypatch):
    args = arguments(tmp_path, "--lrs=1e-3,1e4")
    text = depth_training.train_study(args)
    assert (tmp_path / "train.md").read_text() == text
    assert "| 1 | T-Fixup | 1e-3 |" in text
    assert "diverged, update" in text, "a rate of ten thousand"
    for picture in ("train.png", "train_rates.png"):
        assert (tmp_path / picture).stat().st_size > 5000
    assert not list(tmp_path.glob("**/*.pt"))

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("training_run.start", refuse)
    assert depth_training.train_study(args) == text
