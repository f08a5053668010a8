"""The published training loop of GradInit, reproduced: every branch and every scale of two traces in float64."""

from pathlib import Path

import pytest
import torch

from coldstart.gradinit import gradinit

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "gradinit"


def part(sample, rows):
    """Some sentences of a batch, as the criterion takes them."""
    tensors = {name: value[rows] for name, value in sample.items()}
    target = tensors.pop("target")
    return {"net_input": tensors, "target": target, "ntokens": int((target != 1).sum())}


def thirds(sample):
    third = len(sample["target"]) // 3
    return part(sample, slice(0, 2 * third)), part(sample, slice(third, None))


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden traces of GradInit are not at hand")
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_published_loop(name, plugin, monkeypatch, tmp_path):
    from fairseq import options, tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from torch.nn import functional

    # fairseq rounds two softmaxes to float32, whatever the model's type; the traces were made without that.
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: functional.softmax(x, dim=dim))
    monkeypatch.setattr(utils, "log_softmax", lambda x, dim, onnx_trace=False: functional.log_softmax(x, dim=dim))
    trace = torch.load(GOLDEN / f"{name}.pt", weights_only=True)
    args = options.parse_args_and_arch(
        options.get_training_parser(), [str(GOLDEN), *trace["extra"].split(), "--max-tokens", "600"]
    )
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).double()
    criterion = task.build_criterion(cfg.criterion)
    model.load_state_dict(trace["init"])
    settings = trace["settings"]

    def loss_fn(model, sample):
        loss, sample_size, _ = criterion(model, sample)
        return loss / sample_size

    iterations = settings["gradinit_iters"]
    samples = trace["batches"]
    result = gradinit(
        model,
        loss_fn,
        [thirds(samples[i % len(samples)]) for i in range(iterations)],
        optimizer=settings["gradinit_alg"],
        eta=settings["gradinit_eta"],
        gamma=settings["gradinit_gamma"],
        lr=settings["gradinit_lr"],
        iterations=iterations,
        min_scale=settings["gradinit_min_scale"],
        grad_clip=settings["gradinit_grad_clip"],
        betas=(settings["gradinit_beta1"], settings["gradinit_beta2"]),
    )
    assert [record.constrained for record in result.history] == trace["constraint_step"]
    assert result.scales.keys() == trace["scales"].keys()
    worst = max(abs(float(trace["scales"][name]) - scale) for name, scale in result.scales.items())
    print(name, worst, sum(trace["constraint_step"]), iterations)
    assert worst < 1e-6
