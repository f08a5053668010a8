"""``--lr-scheduler inverse_sqrt_nowarmup``: the learning-rate schedule of T-Fixup, which starts at the full rate."""

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II


@dataclass
class InverseSqrtNoWarmupConfig(FairseqDataclass):
    decay_period: float = field(
        default=4000,
        metadata={"help": "P: after P updates the learning rate has fallen to 1/sqrt(2) of --lr"},
    )
    lr: list[float] = II("optimization.lr")


def decay_period(value: str | float) -> float:
    """The value as a number of updates; an argparse type.

    Raises:
        argparse.ArgumentTypeError: it is not a positive, finite number.
    """
    try:
        period = float(value)
    except ValueError:
        period = math.nan
    if not 0 < period < math.inf:
        raise argparse.ArgumentTypeError(f"the decay period is a positive number of updates (4000, say), not {value}")
    return period


@register_lr_scheduler("inverse_sqrt_nowarmup", dataclass=InverseSqrtNoWarmupConfig)
class InverseSqrtNoWarmup(FairseqLRScheduler):
    """``lr * sqrt(P / (P + t))`` at update t, with no warmup (Huang et al., ICML 2020; the authors' code).

    fairseq's ``inverse_sqrt`` divides by ``--warmup-updates`` and so cannot start without warmup.
    """

    @classmethod
    def add_args(cls, parser):
        """Add ``--decay-period``, which is checked while the command line is read."""
        config = InverseSqrtNoWarmupConfig()
        help_text = config._get_help("decay_period")
        parser.add_argument("--decay-period", type=decay_period, default=config.decay_period, help=help_text)

    def __init__(self, cfg: InverseSqrtNoWarmupConfig, optimizer):
        super().__init__(cfg, optimizer)
        rates = cfg.lr if isinstance(cfg.lr, Collection) else [cfg.lr]
        if len(rates) > 1:
            raise ValueError(
                f"inverse_sqrt_nowarmup takes one learning rate, not {list(rates)}: "
                "give one --lr, or use --lr-scheduler fixed for a rate an epoch"
            )
        decay_period(cfg.decay_period)
        self.initial_lr = rates[0]
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set and return the learning rate after ``num_updates`` updates."""
        period = self.cfg.decay_period
        self.optimizer.set_lr(self.initial_lr * (period / (period + num_updates)) ** 0.5)
        return self.optimizer.get_lr()
