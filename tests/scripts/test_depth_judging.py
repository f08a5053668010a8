"""`depth_study.py judge`: what the probe foretells, set beside trainings whose end is known."""

import argparse
import math
from dataclasses import replace

import depth_judging
import depth_probing
import depth_training
import pytest
from console import UserError
from depth_judging import Case, best_bounds, first_rate, tally
from depth_starts import DATA, STARTS, Depth
from depth_training import Outcome

from coldstart.depth import KEPT_SPREAD
from coldstart.probe import DepthProbe

SIX = Depth(6, 6)


def probe(kept: float) -> DepthProbe:
    return DepthProbe((), 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2 * kept)


def case(kept: float, loss: float) -> Case:
    diverged_at = 2 if math.isinf(loss) else None
    return Case(STARTS["post_ln"], SIX, "1e-3", probe(kept), Outcome((loss,), (0.0,), diverged_at))


def test_the_first_rate_of_a_warmup_is_one_of_its_steps():
    assert first_rate(STARTS["post_ln"], "3e-3", 150) == "3e-3"
    assert float(first_rate(STARTS["post_ln_warmup"], "3e-3", 150)) == 2e-5


def test_bounds_are_the_gap_that_tells_most_cases_rightly():
    cases = [case(0.05, 4.6), case(0.1, math.inf), case(0.3, 2.0), case(0.6, 1.0), case(math.nan, 4.6)]
    assert best_bounds(cases, stall=4.0) == (0.1, 0.3)
    assert best_bounds([*cases, case(0.2, 2.0)], stall=4.0) == (0.1, 0.2)
    assert best_bounds([case(0.3, 1.0), case(0.5, 1.0)], stall=4.0)[1] <= 0.3


def test_the_tally():
    low, high = KEPT_SPREAD / 2, KEPT_SPREAD * 2
    cases = [case(low, 4.6), case(low, 1.0), case(high, 4.6), case(high, math.inf), case(high, 2.0)]
    assert tally(cases, stall=4.0) == ["5", "3", "2", "1", "2", "3"]


@pytest.fixture
def known(monkeypatch, tmp_path):
    """Trainings and probes that are known: a rate of 1 destroys everything."""
    monkeypatch.setitem(DATA, "cmudict", replace(DATA["cmudict"], data=tmp_path))
    (tmp_path / "letters").write_text("a b c d e f g\n")
    monkeypatch.setitem(depth_training.TARGET_TEXT, "cmudict", "letters")
    monkeypatch.setattr(depth_judging, "prepare", lambda recipe: None)

    def train(self, start, depth, lr, seed):
        return Outcome((5.0 if lr == "1" else 1.0 + depth.layers / 100,) * 12, tuple(map(float, range(12))))

    def measure(self, start, depth, seed):
        return probe(0.01 if float(self.lr) > 0.5 else 0.9)

    monkeypatch.setattr(depth_training.Laboratory, "measure", train)
    monkeypatch.setattr(depth_probing.Laboratory, "measure", measure)


def study(tmp_path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    depth_judging.add_judge_options(parser)
    return parser.parse_args(
        ["--arch=post_ln,post_ln_warmup", "--layers=6,50", "--lrs=1e-3,1", f"--out={tmp_path}", *more]
    )


def test_the_study(known, tmp_path):
    text = depth_judging.judge_study(study(tmp_path))
    assert (tmp_path / "judge.md").read_text() == text
    for depth, part in ((6, "calibrated on"), (50, "held out")):
        assert f"| no warmup, {part}: {depth} layers | 2 | 1 | 2 | 0 | 0 | 1 |" in text
        # A warmup's first rate is small, so its stall at the peak is missed.
        assert f"| warmup, {part}: {depth} layers | 2 | 1 | 1 | 0 | 1 | 1 |" in text
    assert "| Post-LN, warmup | 50 | 1 | 0.90 | 5.00 |" in text
    assert (tmp_path / "judge.png").stat().st_size > 5000


def test_nothing_to_calibrate_on(known, tmp_path):
    with pytest.raises(UserError, match="none of --layers is a depth of --calibrate 3, on which"):
        depth_judging.judge_study(study(tmp_path, "--calibrate=3"))


def test_shortened_trainings_are_not_judged(known, tmp_path):
    with pytest.raises(UserError, match="can't be judged beside the others"):
        depth_judging.judge_study(study(tmp_path, "--layers=6,200:100"))
