"""fairseq-train with GradInit in float64, for exact comparisons.

``python double_gradinit.py DIRECTORY float64|float32 options...``: each process writes its scales, its weights and
the branch of each iteration there.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from fairseq import utils
from fairseq_cli.train import cli_main
from torch.nn import functional

PLUGIN = Path(__file__).parents[2] / "user_dir"


def main(directory: Path, dtype: torch.dtype, line: list[str]) -> None:
    utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))
    from user_dir.tasks import gradinit

    learn, run = gradinit.gradinit, gradinit.GradInitRun.run

    def recorded(model, *args, **kwargs):
        result = learn(model, *args, **kwargs)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        branches = [record.constrained for record in result.history]
        torch.save((result.scales, weights, branches), directory / f"{os.environ.get('RANK', 0)}.pt")
        return result

    def in_float64(self):
        self.model.double()
        run(self)
        self.model.float()

    gradinit.gradinit = recorded
    if dtype == torch.float64:
        gradinit.GradInitRun.run = in_float64
        for name in ("softmax", "log_softmax"):  # fairseq's own are always in float32
            setattr(utils, name, lambda x, dim, onnx_trace=False, name=name: getattr(functional, name)(x, dim))
    sys.argv = ["fairseq-train", *line]
    cli_main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:])
