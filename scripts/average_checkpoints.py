"""Average the weights of several checkpoints of one training into one for fairseq-generate.

    python scripts/average_checkpoints.py runs/iwslt14/checkpoints --last 10 --out runs/iwslt14/average.pt
    python scripts/average_checkpoints.py runs/iwslt14/checkpoints --epochs 291-300 --out runs/iwslt14/average.pt
    python scripts/average_checkpoints.py A.pt B.pt C.pt --out average.pt

Sums are in float64, and each weight is written in the type that it had. What is no average (the configuration, integer
buffers) is the last checkpoint's; the state of the optimiser and of the training data is left out, so a training that
starts from the average starts at update 0 of epoch 1.
"""

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from console import UserError, one_sentence_errors
from tqdm import tqdm

from coldstart.__main__ import plugin_path

EPOCHS = r"checkpoint(\d+)\.pt"
UPDATES = r"checkpoint_\d+_(\d+)\.pt"
FAIRSEQS_OWN = re.compile(rf"{EPOCHS}|{UPDATES}|checkpoint(_last|_best|\.best_.*)\.pt")

State = dict[str, Any]
Weights = dict[str, torch.Tensor]
Kind = tuple[tuple[int, ...], torch.dtype]  # shape and type


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """The checkpoints of a folder whose names match, by their number, in ascending order."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := re.fullmatch(pattern, path.name))]
    return dict(sorted(found))


def last(folder: Path, count: int, pattern: str = EPOCHS) -> list[Path]:
    """The `count` checkpoints of highest number, in ascending order. Raises `UserError` where there are fewer."""
    found = list(numbered(folder, pattern).values())
    if len(found) < count:
        kind = "epochs (checkpointN.pt)" if pattern == EPOCHS else "updates (checkpoint_E_N.pt)"
        raise UserError(f"{folder} has {len(found)} checkpoints of {kind}, and {count} are to be averaged")
    return found[-count:]


def epochs(folder: Path, first: int, final: int) -> list[Path]:
    """The checkpoints of epochs `first` to `final`, both included. Raises `UserError` where one is missing."""
    found = numbered(folder, EPOCHS)
    missing = [epoch for epoch in range(first, final + 1) if epoch not in found]
    if missing:
        raise UserError(f"{folder} has no checkpoint{missing[0]}.pt; if not every epoch was saved, list the files")
    return [found[epoch] for epoch in range(first, final + 1)]


def load(path: Path) -> State:
    """A checkpoint on the CPU, read by fairseq under the plugin's rules: no code that it holds can run.

    Raises `UserError` where it asks for code to be run, is damaged, or was not written by fairseq.
    """
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # importing it says what else could be installed
    from fairseq import checkpoint_utils, utils

    utils.import_user_module(argparse.Namespace(user_dir=str(plugin_path())))
    from user_dir.compat import CheckpointDamaged, CheckpointRefused

    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    except CheckpointRefused as error:
        raise UserError(str(error)) from None
    except CheckpointDamaged:
        raise UserError(f"{path} is truncated or damaged, or no checkpoint; leave it out") from None
    except (AttributeError, KeyError, TypeError):  # what fairseq looks for is not there
        state = {}
    if not isinstance(state.get("model"), dict):
        raise UserError(f"{path} is not a checkpoint that fairseq wrote; leave it out")
    return state


def kinds(weights: Weights) -> dict[str, Kind]:
    """Shape and type of each weight."""
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}


def check_weights(weights: Weights, path: Path, expected: dict[str, Kind], first: Path) -> None:
    """Raise `UserError` where the weights of `path` have NaN, or other names, shapes or types than those of `first`."""
    found = kinds(weights)
    for name in sorted(expected.keys() ^ found.keys()):
        has, lacks = (first, path) if name in expected else (path, first)
        raise UserError(f"{has} has a parameter {name} and {lacks} has none: they are not of one model")
    for name, (shape, dtype) in expected.items():
        if found[name] != (shape, dtype):
            here = "{} {}".format(*found[name])
            raise UserError(f"{name} is {here} in {path}, but {shape} {dtype} in {first}: they are not of one model")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.isnan().any():
            raise UserError(f"{path} has NaN in {name}: its training has diverged; leave it out")


def add(sums: Weights, weights: Weights) -> None:
    """Add the weights that are floating-point numbers to the sums, in float64."""
    for name, weight in weights.items():
        if not weight.is_floating_point():
            continue
        if name in sums:
            sums[name] += weight
        else:
            sums[name] = weight.to(torch.float64, copy=True)


def average(paths: Sequence[Path]) -> State:
    """The checkpoint with the mean weights of `paths`; all else is from the last of them.

    One checkpoint at a time is in memory, beside the sums. Raises `UserError` where one does not fit the first.
    """
    sums: Weights = {}
    expected: dict[str, Kind] = {}
    state: State = {}
    for path in tqdm(paths, desc="average", unit=" checkpoints"):
        state.clear()
        state = load(path)
        state.pop("last_optimizer_state", None)
        expected = expected or kinds(state["model"])
        check_weights(state["model"], path, expected, paths[0])
        add(sums, state["model"])
    put_means(state["model"], sums, len(paths))
    leave_out_training(state, paths)
    return state


def put_means(weights: Weights, sums: Weights, count: int) -> None:
    """Replace each weight by its sum (which is used up) divided by `count`; tied weights stay one tensor."""
    tied: dict[tuple, torch.Tensor] = {}
    for name, weight in weights.items():
        if name not in sums:
            continue
        mean = sums.pop(name).div_(count).to(weight.dtype)
        place = (weight.untyped_storage().data_ptr(), weight.storage_offset(), weight.shape, weight.stride())
        twin = tied.setdefault(place, mean)
        weights[name] = twin if torch.equal(twin, mean) else mean


def leave_out_training(state: State, paths: Sequence[Path]) -> None:
    """Keep only what loading needs, in the form in which fairseq writes it, and note what was averaged."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(state.get("cfg")):
        state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    state["optimizer_history"] = state["optimizer_history"][-1:]
    state["extra_state"] = {
        "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0},
        "averaged": [str(path) for path in paths],
    }


def write(state: State, out: Path) -> None:
    """Write a checkpoint whole or not at all. Raises `UserError` where it cannot be written."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(out)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {out}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def check_out(out: Path, paths: Sequence[Path]) -> None:
    """Raise `UserError` where the average would overwrite a checkpoint, or be taken for one of the training's."""
    if out.resolve() in [path.resolve() for path in paths]:
        raise UserError(f"the average would overwrite {out}, which is one of those averaged; choose another --out")
    if FAIRSEQS_OWN.fullmatch(out.name):
        raise UserError(f"fairseq itself writes {out.name}; choose another --out, such as average.pt")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file with --out, such as {out / 'average.pt'}")


def epoch_range(text: str) -> tuple[int, int]:
    """`291-300` as a pair, for argparse."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is no range of epochs, such as 291-300")
    return int(match[1]), int(match[2])


def positive(text: str) -> int:
    """A number of checkpoints, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of checkpoints; give 1 or more")
    return int(text)


def chosen(args: argparse.Namespace) -> list[Path]:
    """The files that the arguments ask for, the last one last. Raises `UserError` where some are missing."""
    if not (args.last or args.last_updates or args.epochs):
        for path in args.inputs:
            if path.is_dir():
                raise UserError(f"{path} is a folder; say which of its checkpoints: --last, --last-updates or --epochs")
            if not path.is_file():
                raise UserError(f"there is no file {path}")
        return args.inputs
    folder = args.inputs[0]
    if len(args.inputs) > 1 or not folder.is_dir():
        raise UserError("--last, --last-updates and --epochs choose from one folder; give its name alone")
    if args.epochs:
        return epochs(folder, *args.epochs)
    return last(folder, args.last, EPOCHS) if args.last else last(folder, args.last_updates, UPDATES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Average the weights of several checkpoints of one training.")
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="checkpoints, or the folder they are in")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="checkpoint to write")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--last", type=positive, metavar="N", help="the last N epochs of the folder: checkpointN.pt")
    choice.add_argument("--last-updates", type=positive, metavar="N", help="the last N of checkpoint_E_N.pt")
    choice.add_argument("--epochs", type=epoch_range, metavar="A-B", help="epochs A to B of the folder")
    args = parser.parse_args()
    with one_sentence_errors():
        paths = chosen(args)
        check_out(args.out, paths)
        write(average(paths), args.out)
        print(f"{args.out} is the average of {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()
