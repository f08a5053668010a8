"""Learning curves from fairseq's JSON logs, as a picture.

    python scripts/plot_curves.py runs/g2p/log.jsonl runs/g2p-post_ln/log.jsonl --out curves.png

Logs come from `fairseq-train --log-format json --log-file LOG`. Lines are the training loss (the mean since the
point before), dots on lines the validation loss; both in bits per target token. The legend has the last loss.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from console import UserError, one_sentence_errors, readable
from training_log import TrainingLog, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#5d5179", "#8d96a3")


@contextmanager
def drawing(out: Path, size: tuple[float, float], columns: int = 1, share_y: bool = True) -> Iterator[list["Axes"]]:
    """Yield the panels of a picture, side by side; it is written to `out` when the block ends well.

    Raises `UserError` where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed; run: pip install 'coldstart[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False, sharey=share_y)
    for axes in panels[0]:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        yield list(panels[0])
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    finally:
        pyplot.close(figure)


def plot(logs: dict[str, TrainingLog], out: Path, title: str = "", log_scale: bool = False) -> None:
    """Draw the training and validation loss of each log (the key is its label) into the picture `out`.

    Raises `UserError` where a log holds no losses or matplotlib is not installed.
    """
    with drawing(out, (7.5, 4.5)) as (axes,):
        for index, (label, log) in enumerate(logs.items()):
            colour = COLOURS[index % len(COLOURS)]
            updates, losses = log.losses("train")
            if not updates:
                raise UserError(f"the log of {label} has no losses; train with --log-format json --log-file LOG")
            if log.valid:
                axes.plot(updates, losses, color=colour, alpha=0.45, linewidth=1, label=f"{label}, training")
                updates, losses = log.losses("valid")
                shown = f"{label}, validation: {losses[-1]:.2f}"
                axes.plot(updates, losses, "o-", color=colour, markersize=4, label=shown)
            else:
                axes.plot(updates, losses, color=colour, linewidth=1.4, label=f"{label}: {losses[-1]:.2f}")
        if log_scale:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("updates")
        axes.set_ylabel("loss (bits per token)")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False)


def labels_of(paths: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """The labels given, or the names of the folders that the logs are in."""
    if not labels:
        return [path.parent.name or path.stem for path in paths]
    if len(labels) != len(paths):
        raise UserError(f"{len(labels)} labels for {len(paths)} logs; give one label for each log")
    return list(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves from fairseq's JSON logs.")
    parser.add_argument("logs", type=readable, nargs="+", metavar="LOG", help="fairseq-train's --log-file")
    parser.add_argument("--labels", nargs="+", help="one for each log; default: the logs' folders")
    parser.add_argument("--title", default="")
    parser.add_argument("--log-scale", action="store_true", help="logarithmic loss axis")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write")
    args = parser.parse_args()
    with one_sentence_errors():
        labels = labels_of(args.logs, args.labels)
        logs = {label: read_log(path) for label, path in zip(labels, args.logs, strict=True)}
        plot(logs, args.out, args.title, args.log_scale)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
