"""The GradInit tasks in this process: options, the split into S and S~, and what the trainer starts from."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer import TransformerModel
from fairseq.trainer import Trainer
from hypothesis import given
from hypothesis import strategies as st

from coldstart.gradinit import Settings
from coldstart.scales import Scales

SIZES = {"embed-dim": 16, "ffn-embed-dim": 32, "attention-heads": 2, "layers": 2}
SMALL = [word for name, size in SIZES.items() for side in ("encoder", "decoder") for word in (f"--{side}-{name}", size)]
OVERLAPS = st.floats(0, 1) | st.sampled_from([0.0, 0.25, 0.5, 1.0])


@pytest.fixture(scope="module")
def gradinit_task(plugin):
    from user_dir.tasks import gradinit

    return gradinit


@pytest.fixture
def configure(reversal_data, plugin, tmp_path):
    """``configure(*options)``: fairseq's configuration of a small training on the CPU."""

    def parse(*more, data=reversal_data, task="gradinit_translation", arch="transformer"):
        line = [
            *(data, "--user-dir", plugin, "--task", task, "--arch", arch, *(SMALL if arch != "lstm" else ())),
            *("--cpu", "--num-workers", 0, "--dropout", 0, "--save-dir", tmp_path, "--log-format", "json"),
            *("--optimizer", "adam", "--lr", 1e-3, "--lr-scheduler", "fixed", "--gradinit-iterations", 4, *more),
        ]
        if "--batch-size" not in more:
            line += ["--max-tokens", 500]
        args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, line)))
        cfg = convert_namespace_to_omegaconf(args)
        cfg.criterion.sentence_avg = cfg.optimization.sentence_avg
        return cfg

    return parse


@pytest.fixture
def start(configure):
    """``start(*options)``: a trainer that has everything but its first update behind it, as ``fairseq-train`` does."""

    def begin(*more, prepare=lambda model: None, **kwargs):
        cfg = configure(*more, **kwargs)
        torch.manual_seed(1)
        task = tasks.setup_task(cfg.task)
        model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        prepare(model)
        trainer = Trainer(cfg, task, model, criterion)
        trainer.get_train_iterator(epoch=1)
        return trainer

    return begin


def settings(gradinit_task, cfg):
    return gradinit_task.settings_of(tasks.setup_task(cfg.task).gradinit_cfg)


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.get_model().named_parameters()}


def plain(start, arch="transformer", *more):
    """A trainer of the same model, without GradInit."""
    return start(*more, arch=arch, prepare=lambda model: model.load_state_dict(model.state_dict()))


def assert_scaled(scaled, initial, scales, **tolerance):
    for name, weight in initial.items():
        torch.testing.assert_close(scaled[name], (weight * scales[name]).to(scaled[name]), msg=name, **tolerance)


def test_settings_come_from_the_other_options(configure, gradinit_task):
    expected = Settings("adam", 1e-3, 100.0, 2.5e-3, 4, 0.01, None, (0.9, 0.98))
    assert settings(gradinit_task, configure()) == expected
    sgd = settings(gradinit_task, configure("--optimizer", "sgd", "--lr", "0.1,0.05"))
    assert (sgd.optimizer, sgd.eta, sgd.gamma) == ("sgd", 0.1, 1.0)


def test_own_options_come_first(configure, gradinit_task):
    given = {"optimizer": "sgd", "eta": 0.5, "gamma": 7.0, "lr": 0.1, "min-scale": 0.2, "grad-clip": 3.0}
    line = [word for name, value in given.items() for word in (f"--gradinit-{name}", value)]
    found = settings(gradinit_task, configure(*line, "--gradinit-betas", "(0.5, 0.6)"))
    assert found == Settings("sgd", 0.5, 7.0, 0.1, 4, 0.2, 3.0, (0.5, 0.6))


def test_780_iterations_unless_told_otherwise(plugin, reversal_data):
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(reversal_data), "--task", "gradinit_translation", "--arch", "lstm"])
    assert args.gradinit_iterations == 780
    assert args.gradinit_lr == 2.5e-3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["--gradinit-iterations", 0], "--gradinit-iterations must be a whole number from 1 on, not 0"),
        (["--gradinit-optimizer", "rmsprop"], "--gradinit-optimizer must be 'adam' or 'sgd', not 'rmsprop'"),
        (["--gradinit-eta", -1], "--gradinit-eta must be a positive number, not -1.0"),
        (["--gradinit-gamma", 0], "--gradinit-gamma must be a positive number, not 0.0"),
        (["--lr", 0], "--lr must be a positive number, not 0"),
        (["--gradinit-lr", "nan"], "--gradinit-lr must be a positive number, not nan"),
        (["--gradinit-min-scale", 2], "--gradinit-min-scale must be between 0 and 1"),
        (["--gradinit-grad-clip", 0], "--gradinit-grad-clip must be a positive number"),
        (["--gradinit-betas", "(0.9, 1)"], "--gradinit-betas must be two numbers from 0 to below 1"),
        (["--gradinit-betas", "0.9"], r"--gradinit-betas is a pair such as '\(0.9, 0.98\)', not 0.9"),
        (["--gradinit-overlap", 1.5], "--gradinit-overlap is a share between 0 and 1, not 1.5"),
        (["--gradinit-max-tokens", 0], "--gradinit-max-tokens must be at least 1, not 0"),
        (["--optimizer", "adagrad"], "no first step of --optimizer adagrad: add --gradinit-optimizer adam or sgd"),
        (["--ddp-backend", "fully_sharded"], "whole parameters .* use --ddp-backend pytorch_ddp or legacy_ddp"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_says_what_is_wrong_with_an_option_before_the_model_is_built(line, sentence, configure):
    cfg = configure(*line)
    with pytest.raises(ValueError, match=sentence) as refusal:
        tasks.setup_task(cfg.task).build_model(cfg.model)
    assert "\n" not in str(refusal.value)


@given(sentences=st.integers(0, 300), overlap=OVERLAPS)
def test_the_parts_of_a_batch_share_the_overlap_and_waste_little(gradinit_task, sentences, overlap):
    size, shared = gradinit_task.split_sizes(sentences, overlap)
    if size == 0:
        smallest = 1 if overlap == 1 else 2 if overlap == 0 else 3
        assert sentences < smallest or min(overlap, 1 - overlap) * (sentences / (2 - overlap)) < 2
        return
    assert abs(shared - overlap * size) <= 0.5
    assert 2 * size - shared <= sentences
    if 0 < overlap < 1:
        assert 0 < shared < size
    assert gradinit_task.split_sizes(sentences + 1, overlap)[0] >= size


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    overlap=OVERLAPS,
    parts=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_no_process_gets_an_empty_batch(gradinit_task, lengths, overlap, parts, seed):
    ends = np.cumsum(lengths)
    batches = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    pairs = gradinit_task.split_batches(batches, overlap, parts, np.random.default_rng(seed))
    size, _ = gradinit_task.split_sizes(sum(lengths), overlap)
    if size < parts:
        with pytest.raises(ValueError, match="too few for GradInit to split"):
            next(pairs)
        return
    for first, second in itertools.islice(pairs, 2 * len(batches) + 1):
        assert len(first) == len(second) >= parts
        assert len(set(first)) == len(first)
        assert len(set(second)) == len(second)
        shared = len(set(first) & set(second))
        union = set(first) | set(second)
        assert len(union) == 2 * len(first) - shared
        if 0 < overlap < 1:
            assert 0 < shared < len(first)


def test_batches_come_in_another_order_each_time_round(gradinit_task):
    batches = np.arange(60).reshape(10, 6)
    pairs = gradinit_task.split_batches(batches, 0.5, 1, np.random.default_rng(1))
    orders = [[min(next(pairs)[0]) // 6 for _ in range(10)] for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        MemoryError(),
        MemoryError("Unable to allocate 9. GiB for an array"),
    ],
)
def test_advises_smaller_batches_when_memory_runs_out(error, gradinit_task):
    advises = pytest.raises(MemoryError, match="smaller batches with --gradinit-max-tokens")
    with advises as advice, gradinit_task.memory_advice():
        raise error
    assert advice.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory")])
def test_other_errors_pass(error, gradinit_task):
    with pytest.raises(type(error), match=str(error)), gradinit_task.memory_advice():
        raise error


def test_running_out_of_memory_ends_the_training(start, gradinit_task, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gradinit_task, "gradinit", exhausted)
    with pytest.raises(MemoryError, match="--gradinit-max-tokens"):
        start()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_low_precision_models_are_float32_for_a_while(dtype, gradinit_task):
    model, criterion = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(dtype), torch.nn.Module()
    parameters = list(model.parameters())
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    with contextlib.suppress(KeyError), gradinit_task.in_float32(model, criterion):
        assert {tensor.dtype for tensor in [*model.parameters(), model[1].running_mean]} == {inside}
        raise KeyError
    assert {tensor.dtype for tensor in [*model.parameters(), model[1].running_mean]} == {dtype}
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))


def test_activation_checkpoints_rest_for_a_while(gradinit_task):
    from fairseq.modules.checkpoint_activations import checkpoint_wrapper

    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    checkpointed = model[0].forward
    with contextlib.suppress(KeyError), gradinit_task.without_activation_checkpoints(model):
        assert model[0].forward == model[0].precheckpoint_forward
        raise KeyError
    assert model[0].forward is checkpointed


def test_notes_that_weights_were_loaded(gradinit_task):
    model = torch.nn.Linear(2, 2)
    assert not gradinit_task.PendingGradInit(model).was_loaded()
    pending = gradinit_task.PendingGradInit(model)
    torch.nn.ModuleDict({"wrapped": model}).load_state_dict({"wrapped." + k: v for k, v in model.state_dict().items()})
    assert pending.was_loaded()
    model.load_state_dict(model.state_dict())
    assert not gradinit_task.PendingGradInit(model).was_loaded()


def test_a_model_with_pretrained_parts_is_not_scaled(start, monkeypatch, caplog):
    build = TransformerModel.build_encoder

    def pretrained(cls, *args):
        encoder = build(*args)
        encoder.layers[0].load_state_dict(encoder.layers[0].state_dict())
        return encoder

    initial = weights(plain(start))
    monkeypatch.setattr(TransformerModel, "build_encoder", classmethod(pretrained))
    with caplog.at_level("INFO"):
        assert_scaled(weights(start()), initial, dict.fromkeys(initial, 1.0), rtol=0, atol=0)
    assert "GradInit is skipped: the weights come from a checkpoint" in caplog.text


@pytest.mark.parametrize("arch", ["transformer", "transformer_tfixup", "lstm"])
def test_weights_are_the_initial_ones_times_the_scales(arch, start, tmp_path):
    initial = weights(plain(start, arch))
    file = tmp_path / "scales.json"
    scaled = weights(start("--gradinit-scales", file, arch=arch))
    scales = Scales.load(file).scales
    assert max(abs(scale - 1) for scale in scales.values()) > 5e-3
    assert_scaled(scaled, initial, scales, rtol=0, atol=0)


PRECISIONS = [
    (["--fp16"], torch.float16),
    (["--bf16"], torch.bfloat16),
    (["--memory-efficient-fp16"], torch.float16),
    (["--amp"], torch.float32),
]


@pytest.mark.parametrize(("line", "dtype"), PRECISIONS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_masters_and_moving_averages_start_from_the_scaled_weights(line, dtype, start, tmp_path):
    initial = {name: weight.to(dtype).float() for name, weight in weights(plain(start)).items()}
    file = tmp_path / "scales.json"
    trainer = start("--gradinit-scales", file, *line, "--store-ema", "--ema-fp32", "--ema-decay", 0.999)
    learned = weights(trainer)
    assert {weight.dtype for weight in learned.values()} == {dtype}
    assert_scaled(learned, initial, Scales.load(file).scales, rtol=0, atol=0)
    if line[0] in ("--fp16", "--bf16"):
        for master, weight in zip(trainer.optimizer.fp32_params, learned.values(), strict=True):
            assert torch.equal(master, weight.float())
    averages = trainer.ema.get_model().state_dict(), trainer.ema.fp32_params
    for name, weight in learned.items():
        assert all(torch.equal(average[name], weight.to(average[name])) for average in averages), name
    read = weights(start("--gradinit-scales", file, *line))
    assert_scaled(read, learned, dict.fromkeys(learned, 1), rtol=0, atol=0)


def test_activation_checkpoints_change_no_scale(start, tmp_path):
    files = tmp_path / "with.json", tmp_path / "without.json"
    start("--gradinit-scales", files[0], "--checkpoint-activations")
    start("--gradinit-scales", files[1])
    assert Scales.load(files[0]).scales == Scales.load(files[1]).scales


VARIANTS = [
    ["--batch-size", 8],
    ["--batch-size", 1],
    ["--batch-size", 8, "--max-tokens", 30],
    ["--gradinit-max-tokens", 12],
    ["--required-batch-size-multiple", 1, "--skip-remainder-batch"],
    ["--share-all-embeddings", "--encoder-layerdrop", 0.5, "--quant-noise-pq", 0.5, "--quant-noise-pq-block-size", 4],
    ["--gradinit-overlap", 0],
    ["--gradinit-overlap", 1],
    ["--train-subset", "valid"],
    ["--sentence-avg"],
    ["--optimizer", "adamax", "--gradinit-optimizer", "adam"],
]


@pytest.mark.parametrize("line", VARIANTS, ids=lambda line: " ".join(map(str, line)))
def test_runs_with(line, start, tmp_path):
    initial = weights(plain(start, "transformer", *line))
    scaled = weights(start("--gradinit-scales", tmp_path / "scales.json", *line))
    scales = Scales.load(tmp_path / "scales.json")
    assert all(math.isfinite(record.loss) for record in scales.history)
    assert_scaled(scaled, initial, scales.scales, rtol=0, atol=0)


def test_frozen_parameters_stay(start, tmp_path):
    def freeze(model):
        model.encoder.embed_tokens.requires_grad_(False)

    initial = weights(plain(start))
    scaled = weights(start("--gradinit-scales", tmp_path / "scales.json", prepare=freeze))
    scales = Scales.load(tmp_path / "scales.json").scales
    assert "encoder.embed_tokens.weight" not in scales
    assert_scaled(scaled, initial, {"encoder.embed_tokens.weight": 1} | scales, rtol=0, atol=0)


def test_dropout_and_the_random_numbers_of_the_training_do_not_matter(start, tmp_path):
    files = tmp_path / "with.json", tmp_path / "without.json"
    start("--gradinit-scales", files[0], "--dropout", 0.5, "--attention-dropout", 0.5)
    start("--gradinit-scales", files[1])
    assert Scales.load(files[0]).scales == Scales.load(files[1]).scales


def test_too_few_tokens_for_any_sentence_is_a_sentence(start):
    with pytest.raises(ValueError, match=r"no training sentence is within .* enlarge --gradinit-max-tokens"):
        start("--gradinit-max-tokens", 1)


@pytest.mark.parametrize("content", ["{damaged", "{}", "nan"])
def test_a_file_that_is_no_use_is_set_aside_and_written_anew(content, start, tmp_path, caplog):
    file = tmp_path / "scales.json"
    file.write_text(content)
    start("--gradinit-scales", file)
    assert Scales.load(file).scales
    assert (tmp_path / "scales.json.unfit").read_text() == content
    assert "cannot be used" in caplog.text
    file.write_text("damaged again")
    start("--gradinit-scales", file)
    assert [(tmp_path / f"scales.json.unfit{name}").read_text() for name in ("", ".2")] == [content, "damaged again"]


def test_scales_of_another_model_are_set_aside(start, tmp_path, caplog):
    file = tmp_path / "scales.json"
    start("--gradinit-scales", file, arch="transformer_tfixup")
    start("--gradinit-scales", file)
    assert "they are for another model: " in caplog.text
    assert Scales.load(file).scales.keys() != Scales.load(f"{file}.unfit").scales.keys()


@pytest.mark.parametrize(("gamma", "hardly"), [(1e-6, True), (1e9, False)])
def test_a_gamma_that_leaves_the_loss_no_say_is_named(gamma, hardly, start, caplog):
    start("--gradinit-gamma", gamma)
    said = re.search(r"the gradient norm was \S+ and gamma is \S+, so the loss hardly had a say", caplog.text)
    assert bool(said) == hardly


def test_scales_of_other_settings_are_used_and_named(start, tmp_path, caplog):
    file = tmp_path / "scales.json"
    learned = weights(start("--gradinit-scales", file))
    content = file.read_bytes()
    read = weights(start("--gradinit-scales", file, "--gradinit-gamma", 5))
    assert all(torch.equal(read[name], weight) for name, weight in learned.items())
    assert "were learned with other settings: " in caplog.text
    assert file.read_bytes() == content


@pytest.mark.parametrize("path", ["", ".", "/proc/none/scales.json", "file/scales.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(path, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--gradinit-scales '{path}' cannot be written: "):
        start("--gradinit-scales", path, "--gradinit-iterations", 10**9)


def test_the_file_shows_what_happened(start, tmp_path):
    file = tmp_path / "deep" / "scales.json"
    start("--gradinit-scales", file, "--gradinit-gamma", 1e9)
    scales = Scales.load(file)
    assert scales.settings["gamma"] == 1e9
    assert [record.constrained for record in scales.history] == [False] * 4
    assert all(record.updated_loss is not None for record in scales.history)
    assert scales.statistics.variance_before.keys() == scales.scales.keys()


def test_a_model_whose_weights_are_loaded_is_left_alone(start, caplog):
    caplog.set_level("INFO")
    trainer = plain(start)
    assert "GradInit is skipped: the weights come from a checkpoint, which it never touches" in caplog.text
    assert trainer.task.pending is None
