"""Attention maps before training, plain and mimetic, beside the theory's.

    python scripts/plot_attention.py [--width 128 --heads 4 --length 48] [--out attention.png]

One self-attention with fairseq's own weights and with mimetic ones (language and vision), for words of independent
entries of unit variance with fairseq's sinusoidal positions added. Shown is the mean of the map before the softmax
over many such sequences and heads, in units of its mean diagonal; the theory's is `c (d I + P P^T)`, P the positions.
"""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from console import UserError, one_sentence_errors

if TYPE_CHECKING:
    from torch import Tensor


def positions(length: int, width: int) -> "Tensor":
    """fairseq's sinusoidal positions, (length, width)."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    return SinusoidalPositionalEmbedding.get_embedding(length, width)


def mean_map(mimetic: dict | None, width: int, heads: int, places: "Tensor", draws: int) -> "Tensor":
    """Mean over sequences and heads of `(X + P) W_Q W_K^T (X + P)^T`, (length, length)."""
    import torch
    from fairseq.modules import MultiheadAttention

    from coldstart.mimetic import query_key_factors

    total = torch.zeros(len(places), len(places))
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        if mimetic is None:
            torch.manual_seed(seed)
            attention = MultiheadAttention(width, heads, self_attention=True)
            query, key = attention.q_proj.weight.detach(), attention.k_proj.weight.detach()
        else:
            query, key = query_key_factors(width, width // heads, *mimetic, num_heads=heads, generator=generator)
        words = torch.randn(len(places), width, generator=generator) + places
        total += (words @ query.T) @ (words @ key.T).T / heads
    return total / draws


def draw(maps: dict[str, "Tensor"], out: Path) -> None:
    """One panel a map, on one scale: the deepest colours are plus and minus the mean diagonal of a mimetic map."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed; run: pip install 'coldstart[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(maps), figsize=(3.1 * len(maps), 3.5), layout="constrained", squeeze=False)
    for axes, (label, values) in zip(panels[0], maps.items(), strict=True):
        image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("key's position")
    panels[0][0].set_ylabel("query's position")
    figure.colorbar(image, ax=panels[0], shrink=0.75, label="in units of the mean diagonal")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention maps at initialisation, beside the theory's.")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--draws", type=int, default=300, help="sequences, each with weights of its own")
    parser.add_argument("--out", type=Path, default=Path("attention.png"), help="picture to write")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with one_sentence_errors():
        import torch

        from coldstart.mimetic import LANGUAGE, VISION

        places = positions(args.length, args.width)
        theory = args.width * torch.eye(args.length) + places @ places.T
        raw = {
            "plain": mean_map(None, args.width, args.heads, places, args.draws),
            "mimetic, language": mean_map(LANGUAGE["qk"], args.width, args.heads, places, args.draws),
            "mimetic, vision": mean_map(VISION["qk"], args.width, args.heads, places, args.draws),
            "theory": theory,
        }
        unit = {label: values.diagonal().mean() for label, values in raw.items()}
        unit["plain"] = unit["mimetic, language"]  # its own diagonal is near zero
        draw({label: values / unit[label] for label, values in raw.items()}, args.out)
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
