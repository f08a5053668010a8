"""What an initialisation does to a Transformer at depth.

python scripts/depth_study.py toy     residual branches alone, Xavier against T-Fixup
python scripts/depth_study.py probe   signal, gradient and first update, before training
python scripts/depth_study.py train   short trainings over starts, depths and learning rates
python scripts/depth_study.py judge   how often the probe says rightly which of them stall
python scripts/depth_study.py cost    seconds and memory of an update
"""

import argparse

import torch
from console import one_sentence_errors
from depth_cost import add_cost_options
from depth_judging import add_judge_options
from depth_probing import add_probe_options
from depth_training import add_train_options
from provenance import markdown_table
from torch import Tensor, nn
from torch.nn.functional import linear

from coldstart.depth import verdict
from coldstart.tfixup import encoder_gain

TOY_DEPTHS = (6, 12, 200)
TOY_TOKENS, TOY_WIDTH, TOY_FFN = 64, 32, 128
TOY_LAWS = {"Xavier": lambda num_layers: 1.0, "T-Fixup": encoder_gain}


def toy_growth(num_layers: int, gain: float) -> float:
    """Mean norm of a token behind an encoder without LayerNorm over that before it, at initialisation.

    Attention is linear, every token attending to itself: its queries and keys, which T-Fixup leaves alone, are no part
    of this. The weights have seed 0, the tokens, ``(64, 32)`` and standard normal, seed 1, so that every run has the
    same table.

    Args:
        num_layers: N, each an attention and a feed-forward block.
        gain: of every matrix, V, output projection, and both of the feed-forward block; each is Xavier-uniform.
    """
    weights, tokens = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    shapes = (TOY_WIDTH, TOY_WIDTH), (TOY_WIDTH, TOY_WIDTH), (TOY_FFN, TOY_WIDTH), (TOY_WIDTH, TOY_FFN)

    def drawn(shape: tuple[int, int]) -> Tensor:
        return nn.init.xavier_uniform_(torch.empty(shape), gain=gain, generator=weights)

    stream = start = torch.randn(TOY_TOKENS, TOY_WIDTH, generator=tokens)
    for _ in range(num_layers):
        value, output, inner, outer = map(drawn, shapes)
        stream = stream + linear(linear(stream, value), output)
        stream = stream + linear(linear(stream, inner).relu(), outer)
    return (stream.norm(dim=1).mean() / start.norm(dim=1).mean()).item()


def toy(_: argparse.Namespace) -> str:
    """The table of the toy: how much each initialisation makes of the signal, by depth, and the verdict."""
    growth = {name: [toy_growth(depth, law(depth)) for depth in TOY_DEPTHS] for name, law in TOY_LAWS.items()}
    columns = zip(*growth.values(), strict=True)
    rows = [
        [str(depth), *(f"{ratio:.4e}" for ratio in ratios)] for depth, ratios in zip(TOY_DEPTHS, columns, strict=True)
    ]
    rows.append(["verdict", *(str(verdict(TOY_DEPTHS, ratios)) for ratios in growth.values())])
    return markdown_table(["layers N", *(f"{name}, output / input" for name in growth)], rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What an initialisation does to a Transformer at depth.")
    studies = parser.add_subparsers(required=True, metavar="STUDY")
    study = studies.add_parser("toy", help="residual branches alone, Xavier against T-Fixup; takes a second")
    study.set_defaults(run=toy)
    add_probe_options(studies.add_parser("probe", help="signal, gradient and first update before training, by depth"))
    add_train_options(studies.add_parser("train", help="short trainings over starts, depths and learning rates"))
    add_judge_options(studies.add_parser("judge", help="how often the probe foretells which of those trainings stall"))
    add_cost_options(studies.add_parser("cost", help="seconds and memory of an update, by depth"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with one_sentence_errors():
        print(args.run(args))


if __name__ == "__main__":
    main()
