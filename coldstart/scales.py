"""A set of learned scales, one for each parameter tensor: kept in a file, checked against a model, folded into it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coldstart.gradients import trainable_parameters

__all__ = ["Iteration", "Scales", "Statistics"]

FORMAT, VERSION = "coldstart scales", 1


@dataclass(frozen=True)
class Iteration:
    """What one iteration of GradInit saw.

    Attributes:
        constrained: whether the gradient norm was above gamma, so that it was reduced instead of the loss.
        gradient_norm: the norm of the gradient on S (l1 for Adam, l2 for SGD).
        loss: the loss on S.
        updated_loss: the loss on S~ after the prescribed first step; None where ``constrained``.
    """

    constrained: bool
    gradient_norm: float
    loss: float
    updated_loss: float | None


@dataclass(frozen=True)
class Statistics:
    """What the scales did to a model: figures by parameter name, before and after.

    Attributes:
        weight_norm: Frobenius norm before the scales; after, it is the scale times this.
        variance_before: between-batch variance of the gradient, mean over the entries of a tensor.
        variance_after: the same with the scales.
    """

    weight_norm: dict[str, float]
    variance_before: dict[str, float]
    variance_after: dict[str, float]


@dataclass(frozen=True)
class Scales:
    """Scales of a model's trainable parameters.

    Attributes:
        scales: by parameter name, as in ``model.named_parameters()``: a tied parameter once.
        shapes: shape of each of these parameters.
        settings: how the scales were learned.
        history: one record an iteration.
        statistics: weight norms and gradient variances, where they were measured.
    """

    scales: dict[str, float]
    shapes: dict[str, tuple[int, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    history: tuple[Iteration, ...] = ()
    statistics: Statistics | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the names and shapes of the parameters."""
        lines = (f"{name} {list(shape)}\n" for name, shape in self.shapes.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check(self, model: nn.Module) -> list[str]:
        """What does not fit a model: one sentence for each parameter that is missing, unknown or of another shape."""
        expected = parameter_shapes(model)
        missing = [
            f"the model has {name}, for which there is no scale" for name in expected.keys() - self.shapes.keys()
        ]
        unknown = [
            f"there is a scale for {name}, which the model has not" for name in self.shapes.keys() - expected.keys()
        ]
        reshaped = [
            f"{name} has shape {expected[name]} in the model, but {self.shapes[name]} in the scales"
            for name in expected.keys() & self.shapes.keys()
            if expected[name] != self.shapes[name]
        ]
        return sorted(missing) + sorted(unknown) + sorted(reshaped)

    def apply_(self, model: nn.Module) -> nn.Module:
        """Multiply every parameter of a model by its scale, in place.

        Raises:
            ValueError: the scales belong to another model.
        """
        _refuse_misfits(self.check(model))
        fold_(trainable_parameters(model), self.scales)
        return model

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file, whole or not at all."""
        path = Path(path)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "settings": self.settings,
            "model": {"fingerprint": self.fingerprint, "shapes": {name: list(s) for name, s in self.shapes.items()}},
            "scales": self.scales,
            "statistics": asdict(self.statistics) if self.statistics else None,
            "history": [asdict(record) for record in self.history],
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, model: nn.Module | None = None) -> Scales:
        """Read a file that :meth:`save` wrote.

        Args:
            path: the file.
            model: the model that the scales are for; None to leave that unchecked.

        Raises:
            OSError: the file cannot be read.
            ValueError: one sentence: the file is damaged, has a number that is not finite, is of a newer version, or
                is for another model.
        """
        try:
            scales = cls._parsed(json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant))
            if model is not None:
                _refuse_misfits(scales.check(model))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the scales in {os.fspath(path)} cannot be used: {reason}") from None
        return scales

    @classmethod
    def _parsed(cls, content: Any) -> Scales:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it is no file of scales ('format' is not '{FORMAT}')")
        if content["version"] != VERSION:
            raise ValueError(f"its format version is {content['version']}, but this coldstart reads version {VERSION}")
        shapes = {name: tuple(map(_dimension, shape)) for name, shape in content["model"]["shapes"].items()}
        scales = cls(
            scales=_finite_numbers("scale", content["scales"], shapes),
            shapes=shapes,
            settings=dict(content["settings"]),
            history=tuple(map(_iteration, content["history"])),
            statistics=_statistics(content["statistics"], shapes),
        )
        if scales.fingerprint != content["model"]["fingerprint"]:
            raise ValueError("its list of parameters was changed after it was written (the fingerprint differs)")
        return scales


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of each trainable parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in trainable_parameters(model).items()}


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias: the last part of its name has "bias"."""
    return "bias" in name.rpartition(".")[2]


@torch.no_grad()
def fold_(parameters: Mapping[str, nn.Parameter], scales: Mapping[str, float]) -> None:
    """Multiply each parameter by the scale of its name, in place."""
    for name, parameter in parameters.items():
        parameter.mul_(scales[name])


def _refuse_misfits(misfits: list[str]) -> None:
    if misfits:
        more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        raise ValueError(f"they are for another model: {misfits[0]}{more}")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"it has the number {constant}, which is not finite")


def _finite_numbers(what: str, values: dict[str, Any], shapes: Mapping[str, Any]) -> dict[str, float]:
    if values.keys() != shapes.keys():
        name = min(values.keys() ^ shapes.keys())
        raise ValueError(f"its parameters and the names of its {what}s differ, in {name} first")
    return {name: _number(f"the {what} of {name}", value) for name, value in values.items()}


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value!r}")
    return float(value)


def _dimension(size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"a dimension must be a whole number, not {size!r}")
    return size


def _iteration(record: dict[str, Any]) -> Iteration:
    constrained = record["constrained"]
    if not isinstance(constrained, bool):
        raise ValueError(f"'constrained' must be true or false, not {constrained!r}")
    updated_loss = record["updated_loss"]
    return Iteration(
        constrained,
        gradient_norm=_number("'gradient_norm'", record["gradient_norm"]),
        loss=_number("'loss'", record["loss"]),
        updated_loss=None if updated_loss is None else _number("'updated_loss'", updated_loss),
    )


def _statistics(content: dict[str, Any] | None, shapes: Mapping[str, Any]) -> Statistics | None:
    if content is None:
        return None
    return Statistics(*(_finite_numbers(item.name, content[item.name], shapes) for item in fields(Statistics)))
