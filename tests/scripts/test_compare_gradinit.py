"""The studies of GradInit: their commands, their tables, their pictures, and the digits."""

from dataclasses import replace
from pathlib import Path

import compare_gradinit
import pytest
import torch
from compare_gradinit import Measured, Subject, with_gradinit
from recipes import POST_LN, POST_LN_WARMUP, T_FIXUP


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("data", ["cmudict", "multi30k"])
@pytest.mark.parametrize("base", [POST_LN, POST_LN_WARMUP, T_FIXUP], ids=lambda base: base.name)
def test_fairseq_accepts_the_options(base, data, optimizer, plugin):
    from fairseq import options

    variant = with_gradinit(base, iterations=30, gamma=0.5, overlap=0, lr=0.01)
    command = Subject(data, optimizer, depth=(2, 3)).recipe(seed=4).train(Path("run"), variant)
    args = options.parse_args_and_arch(options.get_training_parser(), command[1:])
    assert (args.task, args.optimizer, args.seed) == ("gradinit_translation", optimizer, 4)
    assert (args.gradinit_iterations, args.gradinit_gamma, args.gradinit_overlap, args.gradinit_lr) == (
        30,
        0.5,
        0,
        0.01,
    )
    assert (args.encoder_layers, args.decoder_layers) == (2, 3)
    assert getattr(args, "warmup_updates", 0) == (150 if base.warmup else 0)


def test_each_subject_and_start_has_a_folder_of_its_own():
    subject = Subject()
    changes = [{"data": "multi30k"}, {"optimizer": "sgd"}, {"depth": (6, 5)}, {"width": 8}, {"lr": "1"}]
    changes += [{"beta2": "0.9"}, {"updates": 5}, {"max_tokens": 7}, {"label_smoothing": 0.1}]
    folders = [subject.folder, *(replace(subject, **change).folder for change in changes)]
    assert len(set(folders)) == len(folders)
    starts = [with_gradinit(POST_LN), with_gradinit(POST_LN, gamma=1), with_gradinit(POST_LN, gamma=2), POST_LN]
    assert len({start.name for start in starts}) == 4


def test_cells_of_the_tables():
    assert Measured((1.0, 3.0), 2, (0.5, 0.25)).loss == "2.00 ± 1.41"
    assert Measured((1.0, 3.0), 2, (0.5, 0.25)).share == "38%"
    assert Measured((2.0,), 3, ()).loss == "2.00 (2 of 3 diverged)"
    assert Measured((), 1, ()).loss == "diverged"


def test_pictures(tmp_path):
    measured = [(value, Measured((value + 1.0,), 1, (0.5,))) for value in (0.1, 1.0)]
    compare_gradinit.draw_sweep(
        {"gamma": measured, "overlap": measured}, measured[0][1], tmp_path / "sweep.png", "loss"
    )
    curves = {("Post-LN", "0.98"): [1.0, None], ("Post-LN, GradInit", "0.98"): [1.0, 2.0]}
    compare_gradinit.draw_stability(curves, [1e-3, 2e-3], tmp_path / "stability.png", "loss")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("sweep.png", "stability.png"))


def test_digits():
    pytest.importorskip("sklearn")
    import gradinit_digits as digits

    train, test = digits.data(seed=1)
    assert len(train[1]) + len(test[1]) == 1797
    for first, second in digits.pairs(train, torch.Generator().manual_seed(1), 3):
        assert len(first[1]) == len(second[1]) == digits.BATCH
        shared = {image.numpy().tobytes() for image in first[0]} & {image.numpy().tobytes() for image in second[0]}
        assert len(shared) == digits.BATCH // 2
    assert digits.network(3)(train[0][:2]).shape == (2, 10)
    assert 0 <= digits.accuracy(digits.network(3), test) <= 100
