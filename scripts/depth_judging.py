"""`depth_study.py judge`: how often the probe says rightly, before training, which trainings stall or diverge."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import depth_probing
import depth_training
from console import UserError, shown
from depth_starts import Depth, depth_named, listed, size_of
from depth_training import STALLED, TARGET_TEXT, Cell, Outcome, add_train_options, entropy, train_start
from plot_curves import COLOURS, drawing
from provenance import markdown_table, provenance
from recipes import Variant
from steps import prepare
from tqdm import tqdm
from training_run import exit_on_sigterm

from coldstart.depth import KEPT_SPREAD, will_stall
from coldstart.probe import DepthProbe

MARKERS = {True: "o", False: "s"}


@dataclass(frozen=True)
class Case:
    """A training, what the probe of its first update measured, and how it ended."""

    start: Variant
    depth: Depth
    lr: str
    probe: DepthProbe
    outcome: Outcome

    @property
    def foretold(self) -> bool:
        """Whether the probe says that it stalls."""
        return will_stall(self.probe)


def first_rate(start: Variant, lr: str, warmup_updates: int) -> str:
    """The learning rate of the first update: a warmup begins with one step of its stairs."""
    return f"{float(lr) / warmup_updates:.6g}" if start.warmup else lr


def cases_of(cells: Sequence[Cell], args: argparse.Namespace) -> list[Case]:
    """Probe the first update of every training of the first seed; points that were probed before are kept."""
    size, seed = size_of(args), args.seeds[0]
    places = [(cell, lr) for cell in cells for lr in cell.rates]
    bar, cases = tqdm(places, unit=" trainings"), []
    for cell, lr in bar:
        bar.set_description(f"{cell.depth} layers, {cell.start.name}, lr {lr}")
        warmup_updates = size.recipe(cell.depth, lr, args.updates, seed).warmup_updates
        rate = first_rate(cell.start, lr, warmup_updates)
        lab = depth_probing.Laboratory(size, rate, False, args.out)
        probe = lab.kept(cell.start, cell.depth, seed) or lab.measure(cell.start, cell.depth, seed)
        cases.append(Case(cell.start, cell.depth, lr, probe, cell.of(lr)[0]))
    return cases


def best_bounds(cases: Sequence[Case], stall: float) -> tuple[float, float]:
    """Between which bounds of the kept spread the most cases are told rightly: the edges of the best gap."""
    spreads = sorted({case.probe.kept_spread for case in cases if math.isfinite(case.probe.kept_spread)})
    edges = [0.0, *spreads, math.inf]

    def right(bound: float) -> int:
        told = (not bound <= case.probe.kept_spread < math.inf for case in cases)
        return sum(stalls == (case.outcome.loss > stall) for stalls, case in zip(told, cases, strict=True))

    return max(pairwise(edges), key=lambda gap: (right(gap[1]), gap[1] - gap[0] if math.isfinite(gap[1]) else 0))


def groups(cases: Sequence[Case], calibrated: Sequence[Depth]) -> dict[str, list[Case]]:
    """The cases with and without warmup, those that the bound is calibrated on and those held out."""
    found: dict[str, list[Case]] = {}
    for warmup, note in ((False, "no warmup"), (True, "warmup")):
        for held_out, part in ((False, "calibrated on"), (True, "held out")):
            own = [c for c in cases if c.start.warmup == warmup and (c.depth not in calibrated) == held_out]
            depths = ", ".join(dict.fromkeys(str(case.depth) for case in own))
            found |= {f"{note}, {part}: {depths} layers": own} if own else {}
    return found


def tally(cases: Sequence[Case], stall: float) -> list[str]:
    """How many trainings there are, how many stalled, and how often the probe, and who sees no danger, is right."""
    stalled = sum(case.outcome.loss > stall for case in cases)
    right = sum(case.foretold == (case.outcome.loss > stall) for case in cases)
    alarms = sum(case.foretold and case.outcome.loss <= stall for case in cases)
    missed = sum(not case.foretold and case.outcome.loss > stall for case in cases)
    majority = max(stalled, len(cases) - stalled)
    return [str(len(cases)), str(stalled), str(right), str(alarms), str(missed), str(majority)]


def judge_study(args: argparse.Namespace) -> str:
    """Judge all trainings, those that are missing after they were made; return the tables and write them.

    Raises `UserError` where no depth is left to calibrate on, or one has fewer updates: it need not have stalled.
    """
    exit_on_sigterm()
    if not set(args.calibrate) & set(args.layers):
        named = ",".join(map(str, args.calibrate))
        raise UserError(
            f"none of --layers is a depth of --calibrate {named}, on which the bound is calibrated; add one"
        )
    if any(depth.updates for depth in args.layers):
        raise UserError(
            "--layers with updates of their own, as 200:100, can't be judged beside the others; leave them out"
        )
    lab = depth_training.Laboratory(size_of(args), args.updates, args.out)
    recipe = lab.size.recipe(args.layers[0], args.lrs[0], args.updates, args.seeds[0])
    prepare(recipe)
    cells = [cell for start in args.arch for cell in train_start(lab, start, args)]
    stall = STALLED * entropy(recipe.data / TARGET_TEXT[lab.size.data])
    cases = cases_of(cells, args)
    low, high = best_bounds([c for c in cases if c.depth in args.calibrate and not c.start.warmup] or cases, stall)
    header = ["trainings", "in all", "stalled", "told rightly", "false alarms", "missed", "all told alike"]
    rows = [[name, *tally(own, stall)] for name, own in groups(cases, args.calibrate).items()]
    wrong = [
        [case.start.label, str(case.depth), case.lr, f"{case.probe.kept_spread:.2f}", f"{case.outcome.loss:.2f}"]
        for case in cases
        if case.foretold != (case.outcome.loss > stall)
    ]
    text = "\n\n".join(
        [
            markdown_table(header, rows),
            f"The bound is {KEPT_SPREAD:g}; from {low:.2f} to {high:.2f} it is best where it is calibrated.",
            "Told wrongly:\n\n" + markdown_table(["start", "layers", "learning rate", "kept spread", "loss"], wrong)
            if wrong
            else "None was told wrongly.",
            f"{provenance(shown(['python', 'scripts/depth_study.py', *sys.argv[1:]]), lab.size.data)}\n"
            f"- first seed, {args.seeds[0]}; stalled or diverged: a loss above {stall:.2f} bits, {STALLED:g} of the "
            "entropy of single tokens\n",
        ]
    )
    (args.out / f"{args.name}.md").write_text(text)
    draw(cases, stall, args.calibrate, args.out / f"{args.name}.png")
    return text


def draw(cases: Sequence[Case], stall: float, calibrate: Sequence[Depth], out: Path) -> None:
    """The kept spread of the first update against the loss that came of the training."""
    starts = list(dict.fromkeys(case.start for case in cases))
    with drawing(out, (7.5, 4.8)) as (axes,):
        for index, start in enumerate(starts):
            colour = COLOURS[index % len(COLOURS)]
            for known, marker in MARKERS.items():
                own = [case for case in cases if case.start == start and (case.depth in calibrate) == known]
                spreads = [min(max(case.probe.kept_spread, 1e-3), 10) if finite(case) else 1e-3 for case in own]
                losses = [min(case.outcome.loss, 1.3 * stall) for case in own]
                filled = colour if index < len(COLOURS) else "none"
                label = start.label if known else None
                axes.scatter(spreads, losses, s=34, marker=marker, edgecolors=colour, facecolors=filled, label=label)
        axes.axvline(KEPT_SPREAD, color="#8d96a3", linestyle="--", linewidth=1)
        axes.axhline(stall, color="#8d96a3", linestyle=":", linewidth=1)
        axes.set(xscale="log", ylim=(0, 1.4 * stall))
        axes.set_xlabel("before training: share of the differences between tokens that the first update leaves")
        axes.set_ylabel("after training: loss (bits a token)")
        axes.set_title(f"circles: {', '.join(map(str, calibrate))} layers; squares: held out", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)


def finite(case: Case) -> bool:
    return math.isfinite(case.probe.kept_spread)


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """The options of this study: those of `train`, whose trainings are judged."""
    add_train_options(parser)
    parser.add_argument(
        "--calibrate",
        type=listed(depth_named),
        default=[Depth(6, 6), Depth(18, 18)],
        metavar="N,N,...",
        help="depths on which the bound is calibrated; default: 6,18",
    )
    parser.set_defaults(run=judge_study, name="judge")
