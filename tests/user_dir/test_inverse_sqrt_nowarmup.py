"""The schedule, against the formula of the authors' code."""

import argparse
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import optim, options, utils
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY

utils.import_user_module(Namespace(user_dir=str(Path(__file__).resolve().parents[2] / "user_dir")))


def schedule(lr, decay_period):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = optim.build_optimizer(
        Namespace(optimizer="sgd", _name="sgd", lr=[0.1], momentum=0.0, weight_decay=0.0), [parameter]
    )
    cfg = Namespace(lr=lr, decay_period=decay_period)
    return LR_SCHEDULER_REGISTRY["inverse_sqrt_nowarmup"](cfg, optimizer), optimizer


def test_starts_at_the_full_rate_and_decays_by_the_formula():
    scheduler, optimizer = schedule([5e-4], 4000)
    assert optimizer.get_lr() == 5e-4
    for t in (0, 1, 100, 4000, 12_000, 1_000_000):
        assert scheduler.step_update(t) == pytest.approx(5e-4 * (4000 / (4000 + t)) ** 0.5, rel=1e-12)
        assert optimizer.get_lr() == scheduler.step_update(t)
    assert scheduler.step_update(4000) == pytest.approx(5e-4 / 2**0.5)
    assert scheduler.step_update(12_000) == pytest.approx(5e-4 / 2)


def test_refuses_several_rates():
    with pytest.raises(ValueError, match="takes one learning rate"):
        schedule([1e-3, 1e-4], 4000)


@pytest.mark.parametrize("period", [0, -1, float("nan"), float("inf"), "long"])
def test_refuses_a_period_that_is_not_positive(period, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="a positive number of updates"):
        schedule([1e-3], period)
    parser = options.get_training_parser()
    arguments = [
        "data",
        "--arch",
        "transformer_tfixup",
        "--lr-scheduler",
        "inverse_sqrt_nowarmup",
        "--decay-period",
        str(period),
    ]
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(parser, arguments)
    assert "argument --decay-period: the decay period is a positive number" in capsys.readouterr().err
