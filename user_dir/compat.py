"""What fairseq 0.12.3 needs on today's PyTorch: one function per mend, each with symptom, version and remedy.

``apply()`` installs them all; importing the plugin (``--user-dir``) calls it. fairseq's commands look these functions
up in their modules at call time, so replacing the module attribute is enough.
"""

import argparse
import ast
import atexit
import collections
import contextlib
import contextvars
import functools
import inspect
import os
import pickle
import queue
import re
import sys
import time
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import omegaconf
import torch
from fairseq import checkpoint_utils, options, trainer
from fairseq.data import data_utils, iterators, language_pair_dataset, token_block_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters, metrics, progress_bar
from fairseq.models import distributed_fairseq_model
from fairseq.modules import multihead_attention
from fairseq.optim import fp16_optimizer
from fairseq.tasks import FairseqTask
from hydra.core.hydra_config import HydraConfig
from omegaconf import base, nodes, open_dict
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.serialization import safe_globals

OPT_OUT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
PREFETCHING_ENDS_WITHIN = 10.0  # seconds


class _NumberType:
    """Stands for numpy.dtype in a checkpoint: numbers only, and deaf to the flags, which a file could forge to have
    bytes of its choosing taken for the addresses of objects."""

    def __init__(self, code: str, *_: Any):
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"expected numbers, but got {self.dtype}")

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _number(kind: _NumberType, data: bytes) -> np.generic:
    """Stands for NumPy's scalar() in a checkpoint."""
    return np.frombuffer(data, kind.dtype, count=1)[0]


class _NumberArray(np.ndarray):
    """Stands for numpy.ndarray in a checkpoint: empty until its state is set; written again as numpy.ndarray."""

    def __new__(cls, *_: Any):
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple) -> None:
        version, shape, kind, *rest = state
        super().__setstate__((version, shape, kind.dtype, *rest))

    def __reduce__(self) -> tuple:
        return np.asarray(self).__reduce__()


# Everything that fairseq writes beside tensors. Each is inert: making one, or setting its attributes, runs no code
# that the file chooses. A pair is an object and the name in the file that stands for it.
PLAIN_TYPES: list[Any] = [
    argparse.Namespace,
    collections.defaultdict,
    dict,
    int,
    list,
    typing.Any,
    omegaconf.DictConfig,
    omegaconf.ListConfig,
    base.ContainerMetadata,
    base.Metadata,
    nodes.AnyNode,
    nodes.BooleanNode,
    nodes.FloatNode,
    nodes.IntegerNode,
    nodes.StringNode,
    (_NumberType, "numpy.dtype"),
    (_NumberArray, "numpy.ndarray"),
    *((_NumberArray, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((_number, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
    (meters.AverageMeter, "fairseq.meters.AverageMeter"),
    (meters.StopwatchMeter, "fairseq.meters.StopwatchMeter"),
    (meters.TimeMeter, "fairseq.meters.TimeMeter"),
    distributed_utils._TensorPlaceholder,
]


class CheckpointRefused(pickle.UnpicklingError):
    """The checkpoint asks for a class outside PLAIN_TYPES, which could run code of the file's choosing."""


class CheckpointDamaged(RuntimeError):
    """The checkpoint is truncated or is no checkpoint."""


def _wrap(owner: Any, name: str) -> Callable:
    """Decorator: replace ``owner.name`` by the decorated ``f(original, *args, **kwargs)``."""
    original = getattr(owner, name)
    bound = isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)

    def install(wrapper: Callable) -> None:
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, staticmethod(replacement) if bound else replacement)

    return install


def _shadow(module: types.ModuleType, name: str, **replaced: Any) -> None:
    """Give ``module`` alone its own copy of the module that it calls ``name``, with some functions replaced."""
    original = getattr(module, name)
    copy = types.ModuleType(original.__name__)
    copy.__dict__.update(vars(original), **replaced)
    setattr(module, name, copy)


def _load_plain(file: Any, **kwargs) -> Any:
    """``torch.load``, for tensors and PLAIN_TYPES. Raises CheckpointRefused or CheckpointDamaged."""
    path = getattr(file, "name", "sent by rank 0")
    try:
        with safe_globals(PLAIN_TYPES):
            return torch.load(file, **kwargs)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        culprit = re.search(r"GLOBAL (\S+)|(?:function|but got) (<.+>|\S+)", str(error))
        if culprit and isinstance(error, pickle.UnpicklingError):
            raise CheckpointRefused(
                f"Checkpoint {path} asks for {culprit[1] or culprit[2]}, which is not one of the plain types that "
                f"fairseq writes and could run code on this machine: if you trust its sender, set {OPT_OUT}=1."
            ) from None
        reason = f"{type(error).__name__}: {str(error).split('. ')[0]}".removesuffix(": ")
        raise CheckpointDamaged(
            f"Checkpoint {path} is truncated or damaged ({reason}): delete it, or name another one with "
            f"--restore-file or --path."
        ) from None


def read_checkpoints_without_running_them() -> None:
    """Symptom: ``_pickle.UnpicklingError: Weights only load failed ... GLOBAL argparse.Namespace``; when training is
    resumed by several processes, on every rank but 0, which sends it to the others.

    Since: PyTorch 2.6, where ``torch.load`` reads tensors only.
    Remedy: allow the plain types that fairseq writes; refuse any other class, by name.
    """
    _shadow(checkpoint_utils, "torch", load=_load_plain)
    _shadow(distributed_utils, "torch", load=_load_plain)


def evaluate_plain(text: str) -> Any:
    """Value of a Python literal in which sequences and numbers may be added and multiplied, e.g. ``[(512, 3)] * 20``.

    Raises ValueError for anything else.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return value(node.left) * value(node.right)
        return ast.literal_eval(node)

    if not isinstance(text, str):
        raise TypeError(f"expected a string, not {type(text).__name__}")
    return value(ast.parse(text.strip(), mode="eval").body)


def evaluate_options_as_literals() -> None:
    """Symptom: none; a checkpoint runs code through an *option* it carries, e.g. ``arch=fconv`` with a Python
    expression in ``encoder_layers``, which fairseq passes to ``eval`` when it builds the model.

    Since: always.
    Remedy: inside fairseq, ``eval`` is ``evaluate_plain``.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            module.eval = evaluate_plain


def gather_on_the_cpu() -> None:
    """Symptom: ``all_gather_list`` dies with ``Torch not compiled with CUDA enabled``.

    Since: always; its buffer is a CUDA tensor.
    Remedy: on a gloo group, PyTorch's own gathering of objects.
    """

    @_wrap(distributed_utils, "all_gather_list")
    def gather(original: Callable, data: Any, group: Any = None, max_size: int = 16384) -> list:
        group = distributed_utils.get_global_group() if group is None else group
        if distributed_utils.use_xla() or dist.get_backend(group) != "gloo":
            return original(data, group, max_size)
        gathered: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, data, group=group)
        return gathered


class AnyDeviceDistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel that ignores the GPU numbers given for a module on the CPU."""

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, **kwargs):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids=device_ids, output_device=output_device, **kwargs)


def train_distributed_on_the_cpu() -> None:
    """Symptom: ``DistributedDataParallel device_ids and output_device arguments only work with single-device GPU
    modules``, with the default ``--ddp-backend pytorch_ddp``.

    Since: always.
    Remedy: leave them out on the CPU.
    """
    distributed_fairseq_model.DistributedDataParallel = AnyDeviceDistributedDataParallel


def _torchrun_world_size() -> int:
    """Number of processes that torchrun started, over all machines; 1 without torchrun."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def _join_torchrun(cfg: omegaconf.DictConfig) -> None:
    """Write torchrun's environment into ``cfg.distributed_training``."""
    world_size, local_rank = _torchrun_world_size(), int(os.environ["LOCAL_RANK"])
    group = cfg.distributed_training
    on_gpu = torch.cuda.is_available() and not cfg.common.cpu
    if not on_gpu and group.distributed_backend == "nccl":
        raise ValueError(
            f"torchrun started {world_size} processes that train on the CPU, but --distributed-backend nccl needs "
            f"GPUs: add --cpu --distributed-backend gloo."
        )
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"torchrun started process number {local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPUs: give --nproc_per_node {torch.cuda.device_count()}."
        )
    with open_dict(group):
        group.distributed_init_method = "env://"
        group.distributed_world_size = world_size
        group.distributed_rank = int(os.environ["RANK"])
        group.device_id = local_rank if on_gpu else 0
        group.distributed_no_spawn = True


def train_once_under_torchrun() -> None:
    """Symptom: none; ``torchrun ... fairseq-train`` on the CPU, or with one GPU a machine, trains N separate models.

    Since: always; torchrun's environment is only read if the machine has several GPUs.
    Remedy: always read it, unless ``--distributed-init-method`` says otherwise.
    """

    @_wrap(distributed_utils, "call_main")
    def call_main(original: Callable, cfg: omegaconf.DictConfig, main: Callable, **kwargs) -> None:
        group = cfg.distributed_training
        given = group.distributed_init_method is not None or group.pipeline_model_parallel or cfg.common.tpu
        evaluates = os.path.basename(main.__code__.co_filename) in ("eval_lm.py", "interactive.py", "validate.py")
        if _torchrun_world_size() > 1 and not given and not evaluates:
            _join_torchrun(cfg)
        original(cfg, main, **kwargs)


def refuse_separate_hydra_trainings() -> None:
    """Symptom: none; ``torchrun ... fairseq-hydra-train`` trains N separate models, as above.

    Since: always; the plugin is imported too late to join them.
    Remedy: RuntimeError with the keys to add.
    """
    world_size = _torchrun_world_size()
    if world_size == 1 or dist.is_initialized() or not HydraConfig.initialized():
        return
    keys = {"world_size": str(world_size)}
    if not torch.cuda.is_available() or HydraConfig.get().overrides.task.count("common.cpu=true"):
        keys |= {"init_method": "env://", "no_spawn": "true", "rank": "'${oc.env:RANK}'", "backend": "gloo"}
    raise RuntimeError(
        f"torchrun started {world_size} processes, but fairseq-hydra-train would train {world_size} separate models: "
        f"add {' '.join(f'distributed_training.distributed_{key}={value}' for key, value in keys.items())}."
    )


def train_bf16_without_a_tpu() -> None:
    """Symptom: ``--bf16`` dies with ``No module named 'torch_xla'``.

    Since: always; fairseq's parser takes ``--bf16`` for ``--tpu``.
    Remedy: a TPU is used only if ``--tpu`` is given.
    """

    @_wrap(options, "parse_args_and_arch")
    def parse(original: Callable, parser: Any, input_args: list[str] | None = None, *rest, **kwargs) -> Any:
        parsed = original(parser, input_args, *rest, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(args, "tpu", False) and args.bf16:
            args.tpu = "--tpu" in (sys.argv[1:] if input_args is None else input_args)
        return parsed


def train_fp16_on_the_cpu() -> None:
    """Symptom: ``--fp16`` on the CPU dies with ``Torch not compiled with CUDA enabled``.

    Since: always; flat gradients are made on the current CUDA device.
    Remedy: ``--fp16-no-flatten-grads`` is implied on the CPU.
    """

    @_wrap(fp16_optimizer.FP16Optimizer, "build_optimizer")
    def build(original: Callable, cfg: omegaconf.DictConfig, params: list, **kwargs) -> Any:
        if params[0].device.type == "cpu":
            cfg.common.fp16_no_flatten_grads = True
        return original(cfg, params, **kwargs)


def skip_overflowing_updates_on_the_cpu() -> None:
    """Symptom: an fp16 overflow, normal while the loss scale is found, dies with ``Torch not compiled with CUDA``.

    Since: always; having lowered the loss scale, the trainer puts a zero on the GPU.
    Remedy: skip the update and go on, as fairseq then does on a GPU.
    """

    @_wrap(trainer.Trainer, "train_step")
    def train_step(original: Callable, self: trainer.Trainer, *args, **kwargs) -> dict | None:
        try:
            return original(self, *args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if self.cuda or not isinstance(error.__context__, OverflowError):
                raise
        self.zero_grad()
        with metrics.aggregate("train"):
            metrics.log_scalar("loss_scale", self.optimizer.scaler.loss_scale, 0, priority=700, round=4)
            metrics.log_stop_time("train_wall")
        return None


def copy_checkpoints_atomically() -> None:
    """Symptom: a run killed while it saves leaves half a ``checkpoint_last.pt`` and cannot be resumed.

    Since: always; checkpoint_last.pt and checkpoint_best.pt are copies written in place.
    Remedy: copy to a temporary name beside it, then rename. A temporary file left by a kill is overwritten next time.
    """

    @_wrap(PathManager, "copy")
    def copy(original: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        temporary = f"{dst_path}.tmp"
        try:
            copied = original(src_path, temporary, overwrite=True)
            os.replace(temporary, dst_path)
        except BaseException:
            if os.path.exists(temporary):
                os.remove(temporary)
            raise
        return copied


def resume_with_the_same_batches() -> None:
    """Symptom: none; a training that is resumed in its second epoch or later goes on with other batches, and ends with
    another loss than an uninterrupted one.

    Since: always; sentences of one length are shuffled with a seed that depends on the epoch in which the batches are
    made, and they are made once in a process.
    Remedy: make them as in the first epoch, unless they are made anew in every epoch.
    """

    @_wrap(FairseqTask, "get_batch_iterator")
    def get_batch_iterator(original: Callable, self: FairseqTask, dataset: Any, *args, **kwargs) -> Any:
        anew = kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
        epoch = kwargs.get("epoch", 1)
        if epoch == 1 or anew or dataset in self.dataset_to_epoch_iter or not self.can_reuse_epoch_itr(dataset):
            return original(self, dataset, *args, **kwargs)
        iterator = original(self, dataset, *args, **kwargs | {"epoch": 1})
        dataset.set_epoch(epoch)
        iterator.epoch = epoch
        return iterator


def keep_the_last_sentences() -> None:
    """Symptom: none; up to 7 sentences of a data set are never translated, validated or trained on, and of a set of
    fewer than 8 nothing is left (``ZeroDivisionError``, ``The dataset is empty``).

    Since: 0.12.3; a last batch that is no multiple of ``--required-batch-size-multiple`` (8) is dropped.
    Remedy: put it back.
    """

    @_wrap(data_utils, "batch_by_size")
    def batch_by_size(original: Callable, indices: np.ndarray, *args, fixed_shapes: Any = None, **kwargs) -> list:
        batches = original(indices, *args, fixed_shapes=fixed_shapes, **kwargs)
        kept = sum(map(len, batches))
        if fixed_shapes is None and kept < len(indices):
            batches = [*batches, np.asarray(indices)[kept:]]
        return batches


def end_prefetching_before_exit() -> None:
    """Symptom: a run that has ended well, all saved, dies with ``terminate called without an active exception`` and
    exit status -6, now and then; under torchrun the other machines then wait for minutes.

    Since: always; the thread that prepares batches still runs while Python exits, if the last epoch is not complete.
    Remedy: before Python exits, have the thread stop after its present batch, and wait for it.
    """
    threads: weakref.WeakSet[iterators.BackgroundConsumer] = weakref.WeakSet()

    @_wrap(iterators.BackgroundConsumer, "__init__")
    def remember(original: Callable, self: iterators.BackgroundConsumer, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        threads.add(self)

    @atexit.register
    def end() -> None:
        deadline = time.monotonic() + PREFETCHING_ENDS_WITHIN
        for thread in [thread for thread in threads if thread.is_alive()]:
            thread._max_len = 0
            while thread.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    thread._queue.get_nowait()
                thread.join(0.01)


def log_every_line_once() -> None:
    """Symptom: the file of ``--log-file`` holds every line again and again, once more with every epoch and validation.

    Since: always; each progress bar opens the file for itself and never closes it.
    Remedy: only the first one does.
    """

    @_wrap(progress_bar, "progress_bar")
    def make_progress_bar(original: Callable, iterator: Any, *args, log_file: str | None = None, **kwargs) -> Any:
        opened = [handler.baseFilename for handler in progress_bar.logger.handlers if hasattr(handler, "baseFilename")]
        if log_file and os.path.abspath(log_file) in opened:
            log_file = None
        return original(iterator, *args, log_file=log_file, **kwargs)


_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("loading", default=False)
_restoring: contextvars.ContextVar[bool] = contextvars.ContextVar("restoring", default=False)


def built_to_be_loaded() -> bool:
    """True while a model is built only to load a checkpoint into it (generate, validate, interactive, hub)."""
    return _loading.get()


def weights_will_be_read() -> bool:
    """True while a model is built whose weights a checkpoint will replace, as far as that can be known."""
    return _loading.get() or _restoring.get()


def _finds_a_checkpoint(cfg: omegaconf.DictConfig) -> bool:
    """Whether a training will start from a file, as ``checkpoint_utils.load_checkpoint`` decides it."""
    suffix = cfg.checkpoint_suffix or ""
    path = cfg.restore_file.replace(".pt", f"{suffix}.pt")
    if cfg.restore_file == "checkpoint_last.pt":
        path = os.path.join(cfg.save_dir, path)
        if cfg.finetune_from_model is not None and not PathManager.exists(path):
            path = cfg.finetune_from_model
    return PathManager.isfile(path)


def tell_models_that_they_will_be_loaded() -> None:
    """Symptom: an expensive initialisation is paid for by fairseq-generate, and on resume, and then overwritten.

    Since: always; ``from_checkpoint`` is not passed on to the model, and on resume it is built before the file is read.
    Remedy: ``built_to_be_loaded()``; ``weights_will_be_read()``.
    """

    @_wrap(checkpoint_utils, "load_model_ensemble_and_task")
    def load(original: Callable, *args, **kwargs) -> Any:
        token = _loading.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _loading.reset(token)

    def add_defaults(original: Callable, cfg: omegaconf.DictConfig) -> None:
        original(cfg)
        _restoring.set(_finds_a_checkpoint(cfg.checkpoint))

    # fairseq-train calls its add_defaults after it has imported the plugin, also under Hydra and in processes of its
    # own, and makes its trainer once the model is built. Whoever trains has imported it already.
    for name in ("fairseq_cli.train", "__main__"):
        if hasattr(sys.modules.get(name), "add_defaults"):
            _wrap(sys.modules[name], "add_defaults")(add_defaults)

    @_wrap(trainer.Trainer, "__init__")
    def initialise(original: Callable, self: trainer.Trainer, *args, **kwargs) -> None:
        _restoring.set(False)
        original(self, *args, **kwargs)


def give_both_attention_masks_one_type() -> None:
    """Symptom: ``UserWarning: Support for mismatched key_padding_mask and attn_mask is deprecated``.

    Since: PyTorch 2.0; fairseq's padding mask is boolean, its causal mask is additive.
    Remedy: add -inf at padding, which is what PyTorch makes of the boolean mask. Only fairseq's attention sees it.
    """

    def attend(query, *args, **kwargs):
        padding, causal = args[13], args[15]
        if padding is not None and causal is not None and padding.dtype != causal.dtype:
            additive = torch.zeros_like(padding, dtype=causal.dtype).masked_fill_(padding, float("-inf"))
            args = (*args[:13], additive, *args[14:])
        return functional.multi_head_attention_forward(query, *args, **kwargs)

    _shadow(multihead_attention, "F", multi_head_attention_forward=attend)


def break_text_at_line_ends() -> None:
    """Symptom: ``--sample-break-mode eos``, and any generation from a language model, dies with ``module 'numpy' has no
    attribute 'compat'``; where that is mended, blank lines give ``RuntimeWarning: overflow encountered``.

    Since: NumPy 2, where also 16-bit numbers stay so when they are subtracted from.
    Remedy: ``np.compat.long`` is int64 in the two modules that name it, and so are the places of blocks.
    """
    for module in (token_block_dataset, language_pair_dataset):
        _shadow(module, "np", compat=types.SimpleNamespace(long=np.int64))

    @_wrap(token_block_dataset.TokenBlockDataset, "_build_slice_indices")
    def build(original: Callable, *args, **kwargs) -> tuple[np.ndarray, ...]:
        sizes, *places = original(*args, **kwargs)
        return sizes, *(array.astype(np.int64) for array in places)


def give_resumed_tasks_their_state() -> None:
    """Symptom: none; what a task has saved in a checkpoint, by which it may refuse one of another dictionary, is not
    given back to it when training is resumed.

    Since: always; only the commands that evaluate do it.
    Remedy: give it to the task of the process that reads the checkpoint.
    """

    @_wrap(trainer.Trainer, "load_checkpoint")
    def load(original: Callable, self: trainer.Trainer, *args, **kwargs) -> Any:
        read = checkpoint_utils.load_checkpoint_to_cpu

        def read_and_give(*read_args, **read_kwargs) -> dict:
            state = read(*read_args, **read_kwargs)
            self.task.load_state_dict(state.get("task_state", {}))
            return state

        checkpoint_utils.load_checkpoint_to_cpu = read_and_give
        try:
            return original(self, *args, **kwargs)
        finally:
            checkpoint_utils.load_checkpoint_to_cpu = read


def show_fresh_models_training_data() -> None:
    """Symptom: none; a model that is initialised by training data gets to see none before the float32 copies of an
    fp16 optimiser, and the moving average of the weights, are made.

    Since: always.
    Remedy: before that, ``model.see_training_data(batches)`` if ``model.wants_training_data``, with the batches of the
    first epoch, the same on every process. A model can tell by a hook that it was loaded, and then wants none.
    """

    @_wrap(trainer.Trainer, "get_train_iterator")
    def get_train_iterator(original: Callable, self: trainer.Trainer, *args, **kwargs) -> Any:
        model = self.get_model()
        wanted = getattr(model, "wants_training_data", False) and self._optimizer is None
        if wanted and self.is_fsdp:
            raise ValueError(
                "--ddp-backend fully_sharded shards the weights before the model can be initialised by training data: "
                "use --ddp-backend pytorch_ddp or legacy_ddp"
            )
        iterator = original(self, *args, **kwargs)
        if wanted:
            apart = {"load_dataset": False, "shard_batch_itr": False, "disable_iterator_cache": True}
            batches = original(self, *args, **kwargs | apart)
            batches.num_workers = batches.buffer_size = 0
            model.see_training_data(self._prepare_sample(batch)[0] for batch in batches.next_epoch_itr())
        return iterator


_applied = False


def apply() -> None:
    """Install every mend. Calling it again changes nothing."""
    global _applied
    if _applied:
        return
    refuse_separate_hydra_trainings()
    read_checkpoints_without_running_them()
    evaluate_options_as_literals()
    gather_on_the_cpu()
    train_distributed_on_the_cpu()
    train_once_under_torchrun()
    train_bf16_without_a_tpu()
    train_fp16_on_the_cpu()
    skip_overflowing_updates_on_the_cpu()
    copy_checkpoints_atomically()
    resume_with_the_same_batches()
    keep_the_last_sentences()
    end_prefetching_before_exit()
    log_every_line_once()
    tell_models_that_they_will_be_loaded()
    give_both_attention_masks_one_type()
    break_text_at_line_ends()
    give_resumed_tasks_their_state()
    show_fresh_models_training_data()
    _applied = True
