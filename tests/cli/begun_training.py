"""Run fairseq-train, and write what each process begins to train to ``RANK.pt`` in the directory that is given first:
the weights, and the float32 copies of the optimiser, if any. The second process measures every variance 1% too large.
"""

import os
import sys
from pathlib import Path

import torch
from fairseq import trainer
from fairseq_cli.train import cli_main

from coldstart import admin

directory, rank = Path(sys.argv.pop(1)), int(os.environ.get("RANK", 0))
directory.mkdir(parents=True, exist_ok=True)
begin_epoch, variance = trainer.Trainer.begin_epoch, admin._variance


def write_and_begin(self, epoch):
    weights = dict(self.get_model().named_parameters())
    copies = dict(zip(weights, getattr(self.optimizer, "fp32_params", ()), strict=False))
    torch.save({"weights": weights, "copies": copies}, directory / f"{rank}.pt")
    begin_epoch(self, epoch)


trainer.Trainer.begin_epoch = write_and_begin
admin._variance = lambda tensor: variance(tensor) * (1.01 if rank else 1)
cli_main()
