"""Learned scales, as a picture: by layer and kind of weight, with what they did to the model and how they were found.

    python scripts/plot_scales.py runs/g2p/scales.json --out scales.png

FILE is what GradInit wrote (`coldstart.scales.Scales.save`). Weight norms and gradient variances are drawn where they
were measured, the iterations where they were recorded.
"""

import argparse
from pathlib import Path

from console import UserError, one_sentence_errors, readable

from coldstart.plots import draw
from coldstart.scales import Scales


def plot(path: Path, out: Path) -> None:
    """Draw the scales in the file `path` into the picture `out`.

    Raises `UserError` where the file is damaged or is `out` itself, where the picture cannot be written, and where
    matplotlib is not installed.
    """
    if out.resolve() == path.resolve():
        raise UserError(f"the picture would overwrite {path}; name another with --out PNG")
    try:
        figure = draw(Scales.load(path), f"Learned scales: {path.name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description="Learned scales, as a picture.")
    parser.add_argument("file", type=readable, metavar="FILE", help="scales that GradInit wrote")
    parser.add_argument("--out", type=Path, metavar="PNG", help="picture to write; default: FILE with .png at its end")
    args = parser.parse_args()
    with one_sentence_errors():
        out = args.out or args.file.with_suffix(".png")
        plot(args.file, out)
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
