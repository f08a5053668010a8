"""``--task wikitext_language_modeling``: language models straight from WikiText or the Penn Treebank, judged by words.

``--task gradinit_wikitext_language_modeling`` is the same after GradInit.
"""

import copy
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.data import FairseqDataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict, safe_round
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from .. import corpus
from .gradinit import GradInitConfig, GradInitTask

logger = logging.getLogger(__name__)


@dataclass
class WikitextLanguageModelingConfig(LanguageModelingConfig):
    level: ChoiceEnum(corpus.LEVELS) = field(
        default="word", metadata={"help": "what the model predicts: words, characters or pieces of words"}
    )
    cache_dir: Optional[str] = field(
        default=None, metadata={"help": "where the binarised text is kept; default: .coldstart beside the text"}
    )
    preprocess_workers: Optional[int] = field(
        default=None, metadata={"help": "processes that binarise the text; default: as many as there are CPUs"}
    )
    sentencepiece_vocab_size: Optional[int] = field(
        default=None,
        metadata={"help": f"pieces for --level sentencepiece; default: {corpus.SENTENCEPIECE_VOCAB_SIZE}"},
    )
    run_train_subset: Any = II("dataset.train_subset")  # fairseq drops an interpolation that has a help text


@dataclass
class GradInitWikitextLanguageModelingConfig(GradInitConfig, WikitextLanguageModelingConfig):
    pass


@register_task("wikitext_language_modeling", dataclass=WikitextLanguageModelingConfig)
class WikitextLanguageModelingTask(LanguageModelingTask):
    """fairseq's ``language_modeling`` (all of its options apply) on a directory of text.

    Logs ``word_ppl``, the perplexity by words, and at character level ``bpc``, bits per character, beside ``ppl``.
    """

    @classmethod
    def setup_task(cls, cfg: FairseqDataclass, **kwargs) -> "WikitextLanguageModelingTask":
        binarised = binarised_text(cfg)
        prepared = copy.copy(cfg)  # a checkpoint keeps the directory of the text
        prepared.data = str(binarised)
        task = super().setup_task(prepared, **kwargs)
        task.text, task.counts = cfg.data, corpus.counts_of(binarised)
        task.evaluated = None  # the split that was iterated over last
        task.state.merge_state_dict({"dictionary": digest_of(task.dictionary.symbols)})
        return task

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what the task has saved in a checkpoint; ValueError if its model was trained on another dictionary."""
        own = self.state.state_dict["dictionary"]
        if state.get("dictionary", own) != own:
            raise ValueError(
                f"the checkpoint was trained with another dictionary than that of {self.text} at --level "
                f"{self.args.level}: give the text and the --level of its training"
            )
        super().load_state_dict(state)

    def load_dataset(self, split: str, *args, **kwargs) -> None:
        if split not in self.counts:
            raise ValueError(f"{self.text} holds no text for the split {split}: it has {', '.join(self.counts)}")
        super().load_dataset(split, *args, **kwargs)

    def get_batch_iterator(self, dataset: FairseqDataset, *args, **kwargs) -> Any:
        self.evaluated = self.split_of(dataset)
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def split_of(self, dataset: FairseqDataset) -> str | None:
        return next((split for split, loaded in self.datasets.items() if loaded is dataset), None)

    def reduce_metrics(self, logging_outputs: list[dict], criterion: torch.nn.Module) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        split = self.args.run_train_subset if criterion.training else self.evaluated
        targets, counts = self.targets_per_token(split), self.counts[split]
        per_word = targets * counts.tokens / counts.words
        per_character = targets * counts.tokens / counts.characters
        metrics.log_derived("word_ppl", lambda meters: utils.get_perplexity(bits_of(meters) * per_word))
        if str(self.args.level) == "char":
            metrics.log_derived("bpc", lambda meters: safe_round(bits_of(meters) * per_character, 3))

    def targets_per_token(self, split: str) -> float:
        """What the criterion averages over, by the tokens of the text: with --add-bos-token, samples have one more."""
        sizes = self.datasets[split].sizes
        return 1 + len(sizes) / sizes.sum() if self.args.add_bos_token else 1.0

    def eval_lm_dataloader(
        self, dataset: FairseqDataset, *, num_workers: int = 1, context_window: int = 0, **kwargs
    ) -> Iterable:
        """The batches for fairseq-eval-lm, whose function ``eval_lm``, which comes next, will report words as well."""
        if context_window > 0:
            num_workers = min(num_workers, 1)  # each batch is the context of the next, so one process must make all
        report_words(self, self.split_of(dataset))
        return super().eval_lm_dataloader(dataset, num_workers=num_workers, context_window=context_window, **kwargs)


@register_task("gradinit_wikitext_language_modeling", dataclass=GradInitWikitextLanguageModelingConfig)
class GradInitWikitextLanguageModelingTask(GradInitTask, WikitextLanguageModelingTask):
    """``wikitext_language_modeling`` (all of its options apply), started by :func:`coldstart.gradinit.gradinit`."""


def binarised_text(cfg: FairseqDataclass) -> Path:
    """The directory of the binarised text, made unless it is there.

    Raises:
        ValueError: one sentence.
    """
    level, workers, vocab_size = str(cfg.level), cfg.preprocess_workers, cfg.sentencepiece_vocab_size
    if not cfg.data:
        raise ValueError("wikitext_language_modeling needs the directory of the text")
    if workers is not None and workers < 1:
        raise ValueError(f"--preprocess-workers must be at least 1, not {workers}")
    if level == "sentencepiece":
        corpus.import_sentencepiece()
        vocab_size = corpus.SENTENCEPIECE_VOCAB_SIZE if vocab_size is None else vocab_size
    elif vocab_size is not None:
        raise ValueError(f"--sentencepiece-vocab-size goes with --level sentencepiece, not with --level {level}")
    directory = Path(cfg.data)
    return corpus.binarised(
        corpus.find_text(directory),
        corpus.Settings(level, vocab_size),
        Path(cfg.cache_dir or directory / ".coldstart"),
        workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    )


def digest_of(symbols: list[str]) -> str:
    """What tells one dictionary from another."""
    return hashlib.blake2b("\n".join(symbols).encode(), digest_size=16).hexdigest()


def bits_of(meters: MetersDict) -> Any:
    """The mean negative log-likelihood of a target in bits, under whichever name the criterion logs it."""
    return meters["nll_loss" if "nll_loss" in meters else "loss"].avg


def report_words(task: WikitextLanguageModelingTask, split: str) -> None:
    """Have the next call of fairseq-eval-lm's ``eval_lm`` log the perplexity by words, and bits per character."""
    from fairseq_cli import eval_lm as command  # not before it is needed: importing it configures logging

    evaluate = command.eval_lm

    def evaluate_and_report(*, batch_iterator: Iterable, **kwargs) -> dict[str, Any]:
        command.eval_lm = evaluate
        batches = TargetCounter(task, batch_iterator)
        results = evaluate(batch_iterator=batches, **kwargs)
        log_words(task, split, batches.targets, float(results["loss"]))
        return results

    command.eval_lm = evaluate_and_report


class TargetCounter:
    """Passes batches on and counts the tokens that the model predicts in them."""

    def __init__(self, task: WikitextLanguageModelingTask, batches: Iterable) -> None:
        self.batches, self.targets = batches, 0
        self.padding, self.bos = task.target_dictionary.pad(), task.args.add_bos_token

    def __iter__(self) -> Iterator[dict]:
        for sample in self.batches:
            if "net_input" in sample:
                self.targets += int(sample["target"].ne(self.padding).sum())
                self.targets -= self.bos * len(sample["target"])
            yield sample


def log_words(task: WikitextLanguageModelingTask, split: str, targets: int, bits: float) -> None:
    """Log what papers report.

    Args:
        targets: tokens that were predicted.
        bits: mean negative log-likelihood of one.

    Raises:
        ValueError: none was predicted, of which fairseq makes a perplexity of 1.
    """
    counts = task.counts[split]
    if targets == 0:
        raise ValueError(
            f"no token of {split} was evaluated, as every sample is longer than the model allows: "
            f"give the --tokens-per-sample of its training"
        )
    if targets != counts.tokens:
        logger.warning(
            f"{targets:,} of the {counts.tokens:,} tokens of {split} were evaluated: the following is not comparable"
        )
    report = f"{split}: word perplexity {utils.get_perplexity(bits * counts.tokens / counts.words):.2f}"
    if str(task.args.level) == "char":
        report += f", {bits * counts.tokens / counts.characters:.4f} bits per character"
    logger.info(f"{report} ({counts.words:,} words and {counts.tokens:,} tokens, ends of lines included)")
