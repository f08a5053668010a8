"""``--task gradinit_translation``, ``--task gradinit_language_modeling``: GradInit, and then the training as it was."""

import ast
import contextlib
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from fairseq import utils
from fairseq.data import FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II
from torch import distributed as dist

from coldstart.gradinit import Settings, gradinit
from coldstart.probe import gradient_variance, weight_norms
from coldstart.scales import Iteration, Scales, Statistics, parameter_shapes

from .. import compat

logger = logging.getLogger(__name__)

OPTIMIZERS = {"adam": "adam", "cpu_adam": "adam", "sgd": "sgd", "nag": "sgd"}
SHARDED_BACKENDS = ("fully_sharded",)
MOSTLY = 0.9  # of the iterations, on the constraint: worth a word
STATISTICS_BATCHES = 8  # for the variances in --gradinit-scales

Pair = tuple[Any, Any]


@dataclass
class GradInitConfig(FairseqDataclass):
    gradinit_iterations: int = field(default=780, metadata={"help": "GradInit: steps that the scales take"})
    gradinit_optimizer: Optional[str] = field(
        default=None,
        metadata={"help": "GradInit: adam (bounds the l1 norm) or sgd (the l2 norm); default: from --optimizer"},
    )
    gradinit_eta: Optional[float] = field(
        default=None, metadata={"help": "GradInit: learning rate of the prescribed first step; default: --lr"}
    )
    gradinit_gamma: Optional[float] = field(
        default=None,
        metadata={
            "help": "GradInit: bound of the gradient norm; default: 0.1/eta (adam), sqrt(0.1/eta) (sgd). "
            "The paper's translation models had 1000 for adam at eta 5e-4 and 37 million parameters"
        },
    )
    gradinit_lr: float = field(default=2.5e-3, metadata={"help": "GradInit: learning rate of the scales"})
    gradinit_betas: str = field(default="(0.9, 0.98)", metadata={"help": "GradInit: Adam's betas for the scales"})
    gradinit_min_scale: float = field(default=0.01, metadata={"help": "GradInit: lower bound of scales of weights"})
    gradinit_grad_clip: Optional[float] = field(
        default=None, metadata={"help": "GradInit: bound of the gradient of each scale; default: none"}
    )
    gradinit_overlap: float = field(
        default=0.5, metadata={"help": "GradInit: share of the second batch's sentences that the first has too"}
    )
    gradinit_max_tokens: Optional[int] = field(
        default=None,
        metadata={"help": "GradInit: tokens of a pair of batches, per process; default: --max-tokens, --batch-size"},
    )
    gradinit_scales: Optional[str] = field(
        default=None,
        metadata={"help": "GradInit: file of scales (JSON), used if it is there and fits the model, else written"},
    )
    # From the run's other options. fairseq drops an interpolation that has a help text.
    optimizer: Any = II("optimizer")  # on the command line the name alone, as --optimizer is; from Hydra the group
    run_lr: Any = II("optimization.lr")
    run_seed: Any = II("common.seed")
    run_train_subset: Any = II("dataset.train_subset")
    run_max_tokens: Any = II("dataset.max_tokens")
    run_batch_size: Any = II("dataset.batch_size")
    run_ddp_backend: Any = II("distributed_training.ddp_backend")
    run_pipeline: Any = II("distributed_training.pipeline_model_parallel")
    run_model_parallel_size: Any = II("common.model_parallel_size")
    run_log_format: Any = II("common.log_format")
    run_log_file: Any = II("common.log_file")
    run_log_interval: Any = II("common.log_interval")
    run_tensorboard_logdir: Any = II("common.tensorboard_logdir")
    run_no_progress_bar: Any = II("common.no_progress_bar")


@dataclass
class GradInitTranslationConfig(GradInitConfig, TranslationConfig):
    pass


@dataclass
class GradInitLanguageModelingConfig(GradInitConfig, LanguageModelingConfig):
    pass


class GradInitTask:
    """Runs GradInit on the training data once, before the optimiser is built, unless the weights were loaded.

    fairseq asks a task for the batches of the training set when it has read a checkpoint (or has found none) and
    before it makes the optimiser, whose float32 master copies, like the moving average of the weights, so start from
    the scaled weights.
    """

    @classmethod
    def setup_task(cls, cfg: FairseqDataclass, **kwargs) -> "GradInitTask":
        task = super().setup_task(cfg, **kwargs)
        task.gradinit_cfg, task.settings, task.pending = cfg, None, None
        return task

    def build_model(self, cfg: FairseqDataclass, *args, **kwargs) -> torch.nn.Module:
        if compat.built_to_be_loaded():
            return super().build_model(cfg, *args, **kwargs)
        self.settings = settings_of(self.gradinit_cfg)
        with watched_loads() as loaded:
            model = super().build_model(cfg, *args, **kwargs)
        self.pending = PendingGradInit(model, bool(loaded))
        return model

    def build_criterion(self, cfg: FairseqDataclass, *args, **kwargs) -> torch.nn.Module:
        criterion = super().build_criterion(cfg, *args, **kwargs)
        if self.pending is not None:
            self.pending.criterion = criterion
        return criterion

    def get_batch_iterator(self, dataset: FairseqDataset, *args, max_positions: Any = None, **kwargs) -> Any:
        pending = self.pending
        if pending is not None and dataset is self.datasets.get(self.gradinit_cfg.run_train_subset):
            self.pending = None
            if pending.was_loaded():
                logger.info("GradInit is skipped: the weights come from a checkpoint, which it never touches")
            else:
                GradInitRun(self, pending.model, pending.criterion, dataset, max_positions).run()
        return super().get_batch_iterator(dataset, *args, max_positions=max_positions, **kwargs)


@register_task("gradinit_translation", dataclass=GradInitTranslationConfig)
class GradInitTranslationTask(GradInitTask, TranslationTask):
    """fairseq's ``translation`` (all of its options apply), started by :func:`coldstart.gradinit.gradinit`."""


@register_task("gradinit_language_modeling", dataclass=GradInitLanguageModelingConfig)
class GradInitLanguageModelingTask(GradInitTask, LanguageModelingTask):
    """fairseq's ``language_modeling`` (all of its options apply), started by :func:`coldstart.gradinit.gradinit`."""


def settings_of(cfg: FairseqDataclass) -> Settings:
    """GradInit's settings: its own options and, where they are not given, the run's.

    Raises:
        ValueError: one sentence that names the option and says what to do instead.
    """
    if cfg.run_ddp_backend in SHARDED_BACKENDS or cfg.run_pipeline or (cfg.run_model_parallel_size or 1) > 1:
        raise ValueError(
            "GradInit needs whole parameters on every process, but --ddp-backend fully_sharded and model parallelism "
            "split them: use --ddp-backend pytorch_ddp or legacy_ddp"
        )
    name = cfg.optimizer if isinstance(cfg.optimizer, str) else getattr(cfg.optimizer, "_name", None)
    optimizer = cfg.gradinit_optimizer or OPTIMIZERS.get(name)
    if optimizer is None:
        raise ValueError(f"GradInit knows no first step of --optimizer {name}: add --gradinit-optimizer adam or sgd")
    if not 0 <= cfg.gradinit_overlap <= 1:
        raise ValueError(f"--gradinit-overlap is a share between 0 and 1, not {cfg.gradinit_overlap}")
    if cfg.gradinit_max_tokens is not None and cfg.gradinit_max_tokens < 1:
        raise ValueError(f"--gradinit-max-tokens must be at least 1, not {cfg.gradinit_max_tokens}")
    try:
        betas = tuple(float(beta) for beta in ast.literal_eval(cfg.gradinit_betas))
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"--gradinit-betas is a pair such as '(0.9, 0.98)', not {cfg.gradinit_betas}") from None
    try:
        return Settings(
            optimizer=optimizer,
            eta=cfg.run_lr[0] if cfg.gradinit_eta is None else cfg.gradinit_eta,
            gamma=cfg.gradinit_gamma,
            lr=cfg.gradinit_lr,
            iterations=cfg.gradinit_iterations,
            min_scale=cfg.gradinit_min_scale,
            grad_clip=cfg.gradinit_grad_clip,
            betas=betas,
        )
    except ValueError as error:
        setting, _, reason = str(error).partition(" ")
        from_lr = setting == "eta" and cfg.gradinit_eta is None
        raise ValueError(f"{'--lr' if from_lr else f'--gradinit-{setting}'.replace('_', '-')} {reason}") from None


class PendingGradInit:
    """A model that waits for GradInit, and whether a checkpoint has been loaded into it, or into a part of it."""

    def __init__(self, model: torch.nn.Module, loaded: bool = False) -> None:
        self.model = model
        self.criterion: torch.nn.Module | None = None
        self._loaded = loaded
        self._hook = model.register_load_state_dict_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._loaded = True

    def was_loaded(self) -> bool:
        """Whether a checkpoint was loaded; asked once."""
        self._hook.remove()
        return self._loaded


@contextlib.contextmanager
def watched_loads() -> Iterator[list[torch.nn.Module]]:
    """Yield the list of the modules into which a state is loaded meanwhile: the pretrained parts of some models."""
    load, loaded = torch.nn.Module.load_state_dict, []

    def noted(module: torch.nn.Module, *args, **kwargs) -> Any:
        loaded.append(module)
        return load(module, *args, **kwargs)

    torch.nn.Module.load_state_dict = noted
    try:
        yield loaded
    finally:
        torch.nn.Module.load_state_dict = load


class GradInitRun:
    """One run of GradInit on the training set of a task."""

    def __init__(self, task: GradInitTask, model, criterion, dataset: FairseqDataset, max_positions: Any) -> None:
        self.task, self.model, self.criterion, self.dataset = task, model, criterion, dataset
        self.cfg, self.settings, self.max_positions = task.gradinit_cfg, task.settings, max_positions
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.group = distributed_utils.get_data_parallel_group() if self.world_size > 1 else None
        self.cuda = next(model.parameters()).is_cuda

    def run(self) -> None:
        """Fold scales into the model: those of the file, or learned ones."""
        scales = self._scales_of_file()
        if scales is not None:
            scales.apply_(self.model)
            logger.info(f"GradInit: scales read from {self.cfg.gradinit_scales}, none learned")
            return
        with in_float32(self.model, self.criterion), without_activation_checkpoints(self.model), memory_advice():
            self._learn()

    def _learn(self) -> None:
        settings = self.settings
        logger.info(
            f"GradInit: {settings.iterations} iterations for {settings.optimizer}, eta {settings.eta:g}, "
            f"gamma {settings.gamma:g}"
        )
        before = self._measure()
        started = time.time()
        pairs = Pairs(self, settings.iterations)
        bar = self._progress_bar(pairs)
        result = gradinit(
            self.model,
            self.mean_loss(self.group),
            bar,
            **asdict(settings),
            process_group=self.group,
            progress=lambda record: bar.log(self._shown(pairs.given, record), tag="gradinit", step=pairs.given),
        )
        constrained = sum(record.constrained for record in result.history)
        logger.info(
            f"GradInit: done in {time.time() - started:.0f} s; {constrained} of {settings.iterations} iterations "
            f"reduced the gradient norm; scales from {min(result.scales.values()):.3g} to "
            f"{max(result.scales.values()):.3g}"
        )
        if constrained > MOSTLY * settings.iterations:
            logger.warning(
                f"GradInit: the gradient norm was {result.history[0].gradient_norm:.4g} and gamma is "
                f"{settings.gamma:g}, so the loss hardly had a say: if the training does not gain, give a larger "
                f"--gradinit-gamma"
            )
        if before is not None:
            norms, variance = before
            statistics = Statistics(norms, variance, self._gradient_variance())
            scales = Scales(result.scales, parameter_shapes(self.model), result.settings, result.history, statistics)
            scales.save(self.cfg.gradinit_scales)
            logger.info(f"GradInit: scales written to {self.cfg.gradinit_scales}")

    def mean_loss(self, group: dist.ProcessGroup | None) -> Callable[[torch.nn.Module, Any], torch.Tensor]:
        """The run's own criterion, by the unit that it is averaged over (target tokens, as a rule).

        Within a group, each process weights its loss so that their mean is that of the whole batch.
        """

        def loss_fn(model: torch.nn.Module, sample: Any) -> torch.Tensor:
            loss, sample_size, _ = self.criterion(model, sample)
            if group is not None:
                total = torch.as_tensor(sample_size, dtype=torch.float64, device=loss.device).clone()
                dist.all_reduce(total, group=group)
                sample_size = (total / dist.get_world_size(group)).item()
            return loss.squeeze() / sample_size  # adaptive_loss has one element in a vector

        return loss_fn

    def batch(self, indices: Sequence[int]) -> Any:
        """The sentences with these numbers, as the criterion takes them."""
        sample = self.dataset.collater([self.dataset[index] for index in indices])
        return utils.move_to_cuda(sample) if self.cuda else sample

    def index_pairs(self, seed: int, parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless pairs of the numbers of the sentences of S and S~, each for at least ``parts`` processes."""
        max_tokens, max_sentences = self.cfg.run_max_tokens, self.cfg.run_batch_size
        if self.cfg.gradinit_max_tokens:
            max_tokens, max_sentences = self.cfg.gradinit_max_tokens, None
        with data_utils.numpy_seed(seed):
            indices = self.dataset.ordered_indices()
        max_positions = utils.resolve_max_positions(self.max_positions, max_tokens)
        if max_positions is not None:
            indices = self.task.filter_indices_by_size(indices, self.dataset, max_positions, True)
        if len(indices) == 0:
            raise ValueError(f"no training sentence is within {max_positions} tokens: enlarge --gradinit-max-tokens")
        batches = self.dataset.batch_by_size(
            indices,
            max_tokens=max_tokens and max_tokens * parts,
            max_sentences=max_sentences and max_sentences * parts,
        )
        return split_batches(batches, self.cfg.gradinit_overlap, parts, np.random.default_rng(seed))

    def _scales_of_file(self) -> Scales | None:
        """The scales of --gradinit-scales, as rank 0 reads them; None where they are to be learned."""
        path = self.cfg.gradinit_scales
        if path is None:
            return None
        found = [None]
        if self.rank == 0 and os.path.isfile(path):
            try:
                found[0] = Scales.load(path, self.model)
            except ValueError as error:
                kept = unused_name(f"{path}.unfit")
                os.replace(path, kept)
                logger.warning(f"GradInit: {error}. It is kept as {kept}, and new scales are learned")
        if self.rank == 0 and found[0] is None:
            refuse_unwritable(path)
        if self.group is not None:
            dist.broadcast_object_list(found, dist.get_global_rank(self.group, 0), group=self.group)
        scales = found[0]
        if scales is not None and scales.settings != self.settings.record():
            logger.warning(f"GradInit: the scales of {path} were learned with other settings: {scales.settings}")
        return scales

    def _measure(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Weight norms and gradient variance, on the process that writes the scales."""
        if self.cfg.gradinit_scales is None or self.rank > 0:
            return None
        return weight_norms(self.model), self._gradient_variance()

    def _gradient_variance(self) -> dict[str, float]:
        pairs = itertools.islice(self.index_pairs(self.cfg.run_seed + 1, parts=1), STATISTICS_BATCHES)
        return gradient_variance(self.model, self.mean_loss(None), (self.batch(first) for first, _ in pairs))

    def _progress_bar(self, pairs: "Pairs") -> progress_bar.BaseProgressBar:
        main = self.rank == 0
        return progress_bar.progress_bar(
            pairs,
            log_format=self.cfg.run_log_format,
            log_interval=self.cfg.run_log_interval,
            log_file=self.cfg.run_log_file,
            prefix="GradInit",
            tensorboard_logdir=self.cfg.run_tensorboard_logdir if main else None,
            default_log_format="simple" if self.cfg.run_no_progress_bar else "tqdm",
        )

    def _shown(self, iteration: int, record: Iteration) -> dict[str, float]:
        """What the bar shows of an iteration; losses in bits, as fairseq logs them."""
        shown = {
            "iteration": iteration,
            "gradient_norm": record.gradient_norm,
            "gamma": self.settings.gamma,
            "constrained": int(record.constrained),
            "loss": record.loss / math.log(2),
        }
        if record.updated_loss is not None:
            shown["updated_loss"] = record.updated_loss / math.log(2)
        return shown


class Pairs:
    """The batches S and S~ of this process, one pair an iteration; an iterable with a length, for the progress bar."""

    def __init__(self, run: GradInitRun, iterations: int) -> None:
        self.run, self.iterations, self.given = run, iterations, 0

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Pair]:
        run = self.run
        for both in itertools.islice(run.index_pairs(run.cfg.run_seed, run.world_size), self.iterations):
            self.given += 1
            yield tuple(run.batch(indices[run.rank :: run.world_size]) for indices in both)


def split_batches(
    batches: Sequence[Sequence[int]], overlap: float, parts: int, generator: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless pairs (S, S~) of sentence numbers from batches in random order.

    A batch that is too small to split, or to give each of ``parts`` processes a sentence, is joined with the next.

    Raises:
        ValueError: all batches together are too small.
    """
    while True:
        joined, split_any = [], False
        for index in generator.permutation(len(batches)):
            joined.extend(batches[index])
            size, shared = split_sizes(len(joined), overlap)
            if size < parts:
                continue
            sentences = generator.permutation(joined)
            yield sentences[:size], sentences[size - shared : 2 * size - shared]
            joined, split_any = [], True
        if not split_any:
            raise ValueError(
                f"the training set has {sum(map(len, batches))} sentences, too few for GradInit to split with "
                f"--gradinit-overlap {overlap} over {parts} processes"
            )


def split_sizes(sentences: int, overlap: float) -> tuple[int, int]:
    """How many sentences S and S~ have each, and how many of them they share: the largest that a batch gives.

    (0, 0) where they would be empty, or where an overlap between 0 and 1 would share none or all.
    """
    for size in range(sentences, 0, -1):
        shared = round(overlap * size)
        if 2 * size - shared <= sentences and (overlap in (0, 1) or 0 < shared < size):
            return size, shared
    return 0, 0


def unused_name(path: str) -> str:
    """The path, or the first of path.2, path.3 and so on that is not there."""
    names = itertools.chain([path], (f"{path}.{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def refuse_unwritable(path: str) -> None:
    """ValueError, before the work is done, where --gradinit-scales could not be written after it."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=name):
            reason = "it is a directory" if os.path.isdir(path) or not path else None
    except OSError as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(f"--gradinit-scales '{path}' cannot be written: {reason}")


@contextlib.contextmanager
def in_float32(*modules: torch.nn.Module) -> Iterator[None]:
    """Low-precision models in float32 for a while; then back."""
    dtypes = {module: parameter.dtype for module in modules for parameter in module.parameters()}
    low = {module: dtype for module, dtype in dtypes.items() if dtype in (torch.float16, torch.bfloat16)}
    for module in low:
        module.float()
    try:
        yield
    finally:
        for module, dtype in low.items():
            module.to(dtype)


@contextlib.contextmanager
def without_activation_checkpoints(model: torch.nn.Module) -> Iterator[None]:
    """Let ``--checkpoint-activations`` rest: fairseq's recomputation knows no ``torch.autograd.grad``."""
    wrapped = {module: module.forward for module in model.modules() if hasattr(module, "precheckpoint_forward")}
    for module in wrapped:
        module.forward = module.precheckpoint_forward
    try:
        yield
    finally:
        for module, forward in wrapped.items():
            module.forward = forward


@contextlib.contextmanager
def memory_advice() -> Iterator[None]:
    """Say what to do when memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        texts = ("out of memory", "can't allocate memory", "not enough memory")
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in texts):
            raise
        raise MemoryError(
            "GradInit ran out of memory (a second derivative takes about half as much again as training): "
            "give it smaller batches with --gradinit-max-tokens"
        ) from error
