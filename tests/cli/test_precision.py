"""Half precision trains on the CPU without further options."""

import argparse
import math

import pytest

# 2^20 is too large a loss scale: the first updates overflow, and must be skipped.
VARIANTS = [
    ("--fp16", "--fp16-init-scale", 2**20),
    ("--memory-efficient-fp16",),
    ("--bf16",),
    ("--memory-efficient-bf16",),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_trains_with_finite_losses(variant, tmp_path, train, log_of):
    output = train(tmp_path, *variant, "--max-update", 4)
    log = log_of(output, "train_inner")
    assert [line["num_updates"] for line in log] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in log)
    assert log[-1]["loss"] < log[0]["loss"]
    assert ("gradient overflow detected" in output) == (len(variant) > 1)


@pytest.mark.parametrize(("given", "tpu"), [([], False), (["--bf16"], False), (["--bf16", "--tpu"], True)])
def test_only_the_tpu_option_asks_for_a_tpu(plugin, given, tpu):
    from fairseq import options

    args = options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", "transformer", *given])
    assert isinstance(args, argparse.Namespace)
    assert (args.tpu, args.bf16) == (tpu, "--bf16" in given)
