"""The study of depth: the toy has the table of the account of T-Fixup that it comes from."""

import math
import subprocess
import sys
from pathlib import Path

import depth_study
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "depth_study.py"
TABLE = {6: (1.5594e1, 1.1502), 12: (2.9281e2, 1.1698), 200: (math.nan, 1.1337)}  # Xavier, T-Fixup


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, SCRIPT, "toy"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_toy_prints_its_table(printed):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    measured = {int(row[0]): tuple(map(float, row[1:])) for row in rows if row[0].isdecimal()}
    assert list(measured) == list(TABLE)
    for depth, ratios in TABLE.items():
        assert measured[depth] == pytest.approx(ratios, rel=5e-5, nan_ok=True)


def test_the_toy_prints_its_verdicts(printed):
    verdicts = printed.splitlines()[-1]
    assert "growing: not finite at N = 200" in verdicts
    assert "flat: N^(-0.01 ± 0.01)" in verdicts


def test_growth_without_weights_is_none_and_of_one_layer_follows_from_the_variances():
    assert depth_study.toy_growth(5, 0.0) == 1
    # Xavier: both matrices of attention keep the variance; of the feed-forward block they make 0.8 * 4 * 1.6 / 2 / 4.
    attention, feed_forward = 1.0, 2 / (1 + 4) * 4 * 2 / (1 + 4) / 2
    expected = ((1 + attention) * (1 + feed_forward)) ** 0.5
    assert depth_study.toy_growth(1, 1.0) == pytest.approx(expected, rel=0.1)


def test_a_study_must_be_named():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "STUDY" in done.stderr
