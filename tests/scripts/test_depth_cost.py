"""The cost of an update by depth: measured once, kept, and told in a table and a picture."""

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import depth_cost
import memory
import pytest
from console import UserError, quiet
from depth_cost import Cost, Laboratory, Point
from depth_starts import DATA, Depth, Size, start_named

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "depth_study.py"
COST = Cost(2_500_000, [(1.0, 1.5), (2.0, 2.4), (1.0, 1.3)], (8 * 2**20, 4 * 2**20))


@pytest.fixture
def data(reversal_data, monkeypatch, plugin):
    """Reversed words in the place of CMUdict."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(depth_cost, "prepare", lambda recipe: None)
    monkeypatch.setitem(DATA, "cmudict", replace(DATA["cmudict"], data=reversal_data))


def options(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    depth_cost.add_cost_options(parser)
    return parser.parse_args(list(map(str, given)))


def test_the_study_measures_each_point_once(data, tmp_path, monkeypatch):
    shape = ("--width", 32, "--max-tokens", 400, "--updates", 1, "--rounds", 1)
    given = options("--arch", "post_ln", "--layers", "10", *shape, "--out", tmp_path)
    text = depth_cost.cost_study(given)
    layers, start, parameters, *figures = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert (layers, start) == ("10", "Post-LN")
    assert 0.1 < float(parameters) < 1
    plain, checkpointed, _, plain_memory, less_memory, _ = figures
    assert min(float(plain), float(checkpointed)) > 0
    assert 1 < float(less_memory) < 0.8 * float(plain_memory)
    assert "slope" not in text
    assert (tmp_path / "cost.md").read_text() == text
    assert (tmp_path / "cost.png").stat().st_size > 5000

    monkeypatch.setattr(depth_cost, "build_from", None)
    monkeypatch.setattr(depth_cost, "measured_alone", None)
    assert depth_cost.cost_study(given) == text


def test_an_update_that_overflows_is_said_so(data, tmp_path):
    lab = Laboratory(Size(width=16, max_tokens=100, extra=("--lr=1e38",)), updates=2, rounds=1, out=tmp_path / "out")
    with quiet(), pytest.raises(UserError, match="tfixup with 1 layers overflows"):
        lab.measure(start_named("tfixup"), Depth(1, 1), print)
    assert not (tmp_path / "out").exists()


def test_the_table():
    costs = {n: Cost(n, COST.seconds, (3 * n * 2**20, n * 2**20)) for n in (2, 4)}
    points = [Point(start_named("tfixup"), Depth(n, n), cost) for n, cost in costs.items()]
    assert depth_cost.row(Point(start_named("post_ln"), Depth(6, 3), COST)) == [
        *("6+3", "Post-LN", "2.50", "1.000", "1.500", "1.30 (1.20 to 1.50)", "8", "4", "0.50"),
    ]
    assert "- T-Fixup: 3.00 MiB, with checkpointing 1.00 MiB" in depth_cost.slope_lines(points)
    assert depth_cost.slope_lines(points[:1]) == ""


def test_whatever_changes_the_cost_changes_the_file(tmp_path):
    sizes = [Size(), Size(width=8), Size(max_tokens=7), Size(optimizer="sgd"), Size("multi30k"), Size(extra=("--a/b",))]
    labs = [*(Laboratory(size, 5, 3, tmp_path) for size in sizes), Laboratory(Size(), 4, 3, tmp_path)]
    labs += [Laboratory(Size(), 5, 2, tmp_path)]
    start, other = start_named("tfixup"), start_named("post_ln")
    files = [lab.file(start, Depth(6, 6)) for lab in labs]
    files += [labs[0].file(other, Depth(6, 6)), labs[0].file(start, Depth(6, 5)), labs[0].file(start, Depth(6, 6, 2))]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("arch", ["nonsense", "transformer_lm"])
def test_an_architecture_that_does_not_fit_is_said_so(arch, plugin, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=rf"'{arch}' is no Transformer with encoder and decoder; give one of post_ln"):
        depth_cost.check(start_named(arch))


def test_gradinit_is_no_architecture():
    with pytest.raises(UserError, match="GradInit leaves the updates after it as they are"):
        depth_cost.check(start_named("gradinit"))


def test_every_start_is_one_that_the_study_knows(plugin, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("post_ln", "pre_ln", "tfixup", "admin", "deepnorm", "mimetic", "transformer_iwslt_de_en"):
        depth_cost.check(start_named(name))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--arch", "tfixup"), "required: --layers"),
        (("--arch", "tfixup", "--layers", ""), "'' is no depth: give 6 for 6+6 layers"),
        (("--arch", "tfixup", "--layers", "6", "--rounds", "0"), "'0' is no number of 1 or more"),
    ],
)
def test_bad_options_are_told_in_a_sentence(given, sentence, capsys):
    with pytest.raises(SystemExit):
        options(*given)
    assert sentence in capsys.readouterr().err


def test_the_study_is_on_the_command_line():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"cost +seconds and memory", done.stdout)


def test_memory_of_a_process_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('so'); print(2 * int(sys.argv[1]))")
    assert memory.measured_alone(str(script), ["21"]) == 42
    script.write_text("raise SystemExit('no memory left')")
    with pytest.raises(UserError, match="no memory left"):
        memory.measured_alone(str(script), [])
    before = memory.of_status("VmRSS")
    kept = bytearray(2**26)
    assert len(kept) * 0.9 < memory.of_status("VmRSS") - before
    assert memory.of_status("VmHWM") >= memory.of_status("VmRSS") - 2**20


def test_memory_needs_an_account_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    with pytest.raises(UserError, match="measure on Linux"):
        memory.of_status("VmRSS")
