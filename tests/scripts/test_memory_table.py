"""Parameters and memory by depth: computed from small models, as larger ones have them."""

import re
import sys
from pathlib import Path

import pytest
from benchmark_speed import build_from
from console import quiet
from depth_starts import Depth
from memory_table import Size, command_of, kept_bytes, parse_args, plan_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "memory_table.py"
SIZE = Size(32, 64, 2)


@pytest.fixture
def small(monkeypatch, plugin):
    """The options for batches of 200 tokens, where the command of the table runs."""
    monkeypatch.chdir(ROOT)
    return parse_args(["--layers", "3+4", "--sizes", str(SIZE), "--max-tokens", "200", "--vocabulary", "100"])


def built(args, depth, checkpointing):
    """Parameters and kept bytes of a model of this depth itself."""
    trainer, (batch,) = build_from(command_of(SIZE, depth, args, checkpointing), 1)
    sample, _ = trainer._prepare_sample(batch)
    model = trainer.model.train()
    return sum(weight.numel() for weight in model.parameters()), kept_bytes(model, trainer.criterion, sample)


def test_a_deeper_model_has_what_the_small_ones_foretell(small):
    with quiet():
        plan, depth = plan_of(SIZE, small), Depth(3, 4)
        whole = built(small, depth, checkpointing=False)
        checkpointed = built(small, depth, checkpointing=True)
    assert whole == (plan.parameters.at(depth), plan.kept.at(depth))
    assert checkpointed == (plan.parameters.at(depth), plan.checkpointed.at(depth))
    assert plan.checkpointed.at(depth) < plan.kept.at(depth) / 2


def test_what_stays_is_weights_gradients_and_moments(small):
    with quiet():
        plan = plan_of(SIZE, small)
    deep = Depth(10**6, 10**6)  # so deep that nothing but what each layer takes counts
    parameters, kept = plan.parameters.at(deep), plan.kept.at(deep)
    alone = plan.peak(deep, "bf16", checkpointing=True, processes=1)
    assert alone - plan.peak(deep, "bf16", checkpointing=True, processes=8) == 7 / 8 * 8 * parameters
    assert plan.peak(deep, "fp32") == pytest.approx((4 + 8) * parameters + kept, rel=1e-3)


def test_the_measured_peak_is_near_the_computed_one(run):
    table = ("--layers", "8", "--sizes", "64-128-2", "--max-tokens", 2000, "--vocabulary", 4000, "--measure")
    output = run(sys.executable, SCRIPT, *table, cwd=ROOT)
    (line,) = re.findall(r"^\| *8 .*$", output, re.MULTILINE)
    *_, plain, checkpointed, sharded, measured, measured_checkpointed = map(float, line.strip("| ").split("|")[2:])
    assert measured == pytest.approx(plain, rel=0.1)
    assert measured_checkpointed == pytest.approx(checkpointed, rel=0.1)
    assert sharded < checkpointed < plain


@pytest.mark.parametrize("given", ["512", "512-2048", "512-2048-0", "512-2048-7", "a-b-c", "9-8-3"])
def test_a_size_that_is_none_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--layers", "6", "--sizes", given])
    assert f"'{given}' is no size" in capsys.readouterr().err
