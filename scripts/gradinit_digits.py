"""GradInit for a convolutional network with BatchNorm, through the library alone: the paper's vision case in small.

    python scripts/gradinit_digits.py [--depths 8 16 32] [--seeds 1 2 3 4]

scikit-learn's digits (1,797 images of 8 by 8 pixels, a fifth of them for the test), SGD with momentum. Writes a
Markdown table of the test accuracy after the first epoch, without GradInit and with it.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from compare_inits import mean_and_spread
from console import one_sentence_errors, shown
from provenance import markdown_table, provenance
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from coldstart.gradinit import gradinit

BATCH = 64
OVERLAP = 0.5  # share of S~ that is in S too
Batch = tuple[Tensor, Tensor]


def network(depth: int, channels: int = 24) -> nn.Sequential:
    """A plain convolutional network: `depth` blocks of convolution, BatchNorm and ReLU, halved in size once."""
    layers: list[nn.Module] = []
    for index in range(depth):
        stride = 2 if index == depth // 2 else 1
        convolution = nn.Conv2d(channels if index else 1, channels, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def data(seed: int) -> tuple[Batch, Batch]:
    """Training and test images (N, 1, 8, 8) in [0, 1], with their digits."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=seed, stratify=digits)
    train, test, train_digits, test_digits = (torch.as_tensor(part) for part in parts)
    return (train.float().view(-1, 1, 8, 8), train_digits), (test.float().view(-1, 1, 8, 8), test_digits)


def batches(examples: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch in random order, whole batches only."""
    images, digits = examples
    order = torch.randperm(len(digits), generator=generator)
    for indices in order.split(BATCH)[: len(digits) // BATCH]:
        yield images[indices], digits[indices]


def pairs(examples: Batch, generator: torch.Generator, count: int) -> Iterator[tuple[Batch, Batch]]:
    """Pairs of batches S and S~, of which half of the second is in the first."""
    images, digits = examples
    shared = int(OVERLAP * BATCH)
    for _ in range(count):
        order = torch.randperm(len(digits), generator=generator)
        first, second = order[:BATCH], order[BATCH - shared : 2 * BATCH - shared]
        yield (images[first], digits[first]), (images[second], digits[second])


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a batch."""
    images, digits = batch
    return functional.cross_entropy(model(images), digits)


def first_epoch(model: nn.Module, examples: Batch, lr: float, generator: torch.Generator) -> None:
    """Train for one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for batch in batches(examples, generator):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, examples: Batch) -> float:
    """Share of right digits, in percent. BatchNorm has statistics of a few batches only, so those of the images
    that are tested are used."""
    images, digits = examples
    model.train()
    return 100 * (model(images).argmax(1) == digits).double().mean().item()


def one_run(depth: int, seed: int, args: argparse.Namespace, learn: bool) -> tuple[float, float]:
    """Test accuracy after the first epoch, and the share of iterations that went to the constraint."""
    train, test = data(seed)
    torch.manual_seed(seed)
    model = network(depth)
    constrained = 0.0
    if learn:
        generator = torch.Generator().manual_seed(seed + 1000)
        result = gradinit(
            model,
            mean_loss,
            pairs(train, generator, args.iterations),
            optimizer="sgd",
            eta=args.lr,
            gamma=args.gamma,
            lr=args.scale_lr,
            iterations=args.iterations,
        )
        constrained = sum(record.constrained for record in result.history) / args.iterations
    first_epoch(model, train, args.lr, torch.Generator().manual_seed(seed))
    return accuracy(model, test), constrained


def main() -> None:
    parser = argparse.ArgumentParser(description="GradInit for a convolutional network on scikit-learn's digits.")
    parser.add_argument("--depths", nargs="+", type=int, default=[8, 16, 32], help="convolutions")
    parser.add_argument("--lr", type=float, default=0.1, help="of SGD, and GradInit's eta")
    parser.add_argument("--gamma", type=float, default=1.0, help="bound of the l2 norm; the rule and the paper: 1")
    parser.add_argument("--scale-lr", type=float, default=1e-2, help="learning rate of the scales")
    parser.add_argument("--iterations", type=int, default=200, help="of GradInit")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/gradinit_digits.md"), help="file for the table")
    args = parser.parse_args()
    with one_sentence_errors():
        rows = []
        for depth in args.depths:
            label = f"{depth} convolutions"
            runs = [
                [one_run(depth, seed, args, learn) for seed in tqdm(args.seeds, desc=f"{label}, {name}", unit=" runs")]
                for learn, name in ((False, "without"), (True, "with GradInit"))
            ]
            without, learned = ([score for score, _ in results] for results in runs)
            share = sum(share for _, share in runs[1]) / len(runs[1])
            rows.append([label, mean_and_spread(without, 1), mean_and_spread(learned, 1), f"{share:.0%}"])
        table = markdown_table(["network", "without, %", "with GradInit, %", "constrained"], rows)
        command = shown(["python", "scripts/gradinit_digits.py", *sys.argv[1:]])
        seeds = f"{len(args.seeds)} seeds ({', '.join(map(str, args.seeds))}): mean ± standard deviation"
        text = f"{table}\n\n{provenance(command, 'scikit-learn digits')}\n- {seeds}\n"
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        print(f"\n{text}\nwritten to {args.out}")


if __name__ == "__main__":
    main()
