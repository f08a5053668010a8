"""Where the weights of a Transformer live.

An initialisation speaks of queries, keys, values, outputs and feed-forward matrices. This module finds
them in the modules of the libraries that people use, and it is the only place that knows the attribute
names of other libraries. Supporting a new library means one more adapter here; every initialisation then
works on it.

Weights are returned as views of the parameters, in PyTorch's ``(out, in)`` layout, so writing to them in
place under ``torch.no_grad()`` writes to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = [
    "Attention",
    "Branch",
    "FeedForward",
    "Layer",
    "NoNorm",
    "Stack",
    "WeightedResidual",
    "find_stacks",
    "layer_norms",
    "remove_layer_norms_",
    "weigh_residuals_",
    "weighted_residuals",
]


@dataclass(frozen=True)
class Attention:
    """The weights of one multi-head attention.

    Attributes:
        name: path of the attention module in the model.
        num_heads: number of heads ``h``; head ``i`` owns rows ``i * k`` to ``(i + 1) * k`` of ``query``,
            ``key`` and ``value``, with ``k = d / h``.
        query: ``(d, d)``.
        key: ``(d, d_key)``, where ``d_key`` is the width of the sequence attended to.
        value: ``(d, d_value)``.
        output: ``(d, d)``, the output projection.
        query_key_biases: biases of queries and keys, and the additional key of ``add_bias_kv``.
        value_output_biases: biases of values and output, and the additional value of ``add_bias_kv``.
    """

    name: str
    num_heads: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_key_biases: tuple[Tensor, ...] = ()
    value_output_biases: tuple[Tensor, ...] = ()

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """Every bias of the module."""
        return self.query_key_biases + self.value_output_biases


@dataclass(frozen=True)
class FeedForward:
    """The two matrices of a feed-forward block: ``inner`` is ``(d_ffn, d)``, ``outer`` is ``(d, d_ffn)``."""

    name: str
    inner: Tensor
    outer: Tensor
    biases: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Branch:
    """One residual branch, as the modules that compute it.

    Attributes:
        kind: "self-attention", "cross-attention" or "feed-forward".
        modules: paths in the model, in the order in which the modules are called. The first input of the first is the
            residual stream; the output of the last, or the first of its outputs, is what joins the stream.
    """

    kind: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One layer: a self-attention, in a decoder perhaps a cross-attention, and a feed-forward block.

    ``name`` is its path in the model; ``branches`` are the same blocks in the order of the forward pass. The layer's
    output, or the first of its outputs, is the residual stream.
    """

    name: str
    self_attention: Attention
    cross_attention: Attention | None
    feed_forward: FeedForward
    branches: tuple[Branch, ...]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        if self.cross_attention is None:
            return (self.self_attention,)
        return (self.self_attention, self.cross_attention)


@dataclass(frozen=True)
class Stack:
    """The layers of an encoder or a decoder, in order, and the matrices around them.

    Attributes:
        name: path of the stack in the model.
        layers: its layers, every one of them, whatever LayerDrop does in training.
        embeddings: its input embeddings; several in an adaptive input, one a band. Empty where the
            library keeps embeddings elsewhere (``torch.nn``).
        projections: matrices between embeddings and layers or between layers and output, ``(out, in)``.
    """

    name: str
    layers: tuple[Layer, ...]
    embeddings: tuple[nn.Embedding, ...] = field(default=())
    projections: tuple[Tensor, ...] = field(default=())

    @property
    def has_cross_attention(self) -> bool:
        return any(layer.cross_attention is not None for layer in self.layers)


def find_stacks(model: nn.Module) -> list[Stack]:
    """Find the Transformer stacks of a model, in the order in which the model holds them.

    Understood are fairseq's encoders and decoders, and ``torch.nn.TransformerEncoder``,
    ``TransformerDecoder`` and any other ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` of
    ``TransformerEncoderLayer`` or ``TransformerDecoderLayer``, and timm's vision Transformers, whose attention has
    queries, keys and values in one matrix: all layers of a container are one stack.

    Args:
        model: any module.

    Raises:
        ValueError: no stack was found, a layer stands outside of any, or a stack mixes layers that are understood
            with others that are not.
    """
    containers = list(_layer_containers(model))
    contained = {child for *_, container in containers for child in _children(container)}
    for name, module in model.named_modules():
        if _is_layer(module) and module not in contained:
            raise ValueError(
                f"Transformer layer '{name}' ({type(module).__name__}) is in no container, so the depth of its stack "
                "is unknown: put the layers of a stack into one nn.ModuleList"
            )
    stacks = [_stack(*found) for found in containers]
    if not stacks:
        raise ValueError(
            f"no Transformer layers found in {type(model).__name__}: expected fairseq's encoder or decoder layers, "
            "torch.nn.TransformerEncoderLayer/TransformerDecoderLayer or timm's blocks; "
            "add an adapter to coldstart/blocks.py"
        )
    return stacks


def layer_norms(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every LayerNorm below ``module``, as pairs of the module that holds it and its attribute name.

    Recognised by name, so that fused variants (apex, fairseq's fp32 one) count too.
    """
    return [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith("LayerNorm")
    ]


class NoNorm(nn.Module):
    """What stands in the place of a LayerNorm that was removed."""

    def __init__(self) -> None:
        super().__init__()
        # torch.nn's layers compare the eps of their norms to see whether their fused kernel, which normalises,
        # may replace them in evaluation. NaN differs from itself, so it never may.
        self.eps = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        # As LayerNorm does. fairseq transposes its stream, and a projection copies a transposed input every time.
        return x.contiguous()


def remove_layer_norms_(module: nn.Module) -> nn.Module:
    """Put :class:`NoNorm` in the place of every LayerNorm below ``module``, in place.

    No parameter is left behind: one that is never used would stop DistributedDataParallel.
    """
    for parent, name in layer_norms(module):
        setattr(parent, name, NoNorm())
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False  # torch.nn's path for padded batches reads the weights of the norms
    return module


class WeightedResidual(nn.Module):
    """The sum of a residual branch and the LayerNorm after it: ``norm(skip_weight * x + f(x))``.

    Attributes:
        norm: the LayerNorm.
        skip_weight: the weight of ``x``: a scalar, or an entry for each feature. A parameter is trained; any other
            tensor is not, but is saved like one, as layers may be loaded into a model of fewer.
    """

    def __init__(self, norm: nn.Module, skip_weight: Tensor) -> None:
        super().__init__()
        self.norm = norm
        if isinstance(skip_weight, nn.Parameter):
            self.skip_weight = skip_weight
        else:
            self.register_buffer("skip_weight", skip_weight)

    def forward(self, summands):
        """``(f(x), x)``: a pair or, in TorchScript, one tensor of both."""
        return self.norm(torch.addcmul(summands[0], self.skip_weight, summands[1]))


def weigh_residuals_(model: nn.Module, stack: Stack, skip_weight: Callable[[], Tensor]) -> list[WeightedResidual]:
    """Give the skip connections of a stack of Post-LN layers a weight, in place: ``norm(weight * x + f(x))``.

    Args:
        model: the module in which the stack was found.
        stack: of fairseq's layers: those of other libraries sum where nothing can come between.
        skip_weight: makes the weight of one branch: a scalar, or ``(d,)``; a parameter where it is to be trained.

    Returns:
        What stands in the places of the LayerNorms, in the order of the forward pass.

    Raises:
        ValueError: a layer is of another library, or normalises before its branches, or has weights already.
    """
    for layer in _modules_of(model, stack):
        for name in _norms_after_branches(layer):
            norm = getattr(layer, name)
            if isinstance(norm, WeightedResidual):
                raise ValueError(f"the residual connections of {stack.name or 'the model'} have weights already")
            setattr(layer, name, WeightedResidual(norm, skip_weight()))
        layer.residual_connection = _leave_the_sum_to_the_norm
    return weighted_residuals(model, stack)


def weighted_residuals(model: nn.Module, stack: Stack) -> list[WeightedResidual]:
    """Every :class:`WeightedResidual` of a stack, in the order of the forward pass."""
    norms = (getattr(layer, name) for layer in _modules_of(model, stack) for name in _norms_after_branches(layer))
    return [norm for norm in norms if isinstance(norm, WeightedResidual)]


def _modules_of(model: nn.Module, stack: Stack) -> list[nn.Module]:
    return [model.get_submodule(layer.name) for layer in stack.layers]


def _layer_containers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield (owner's path, owner, container's path, container) for every container of Transformer layers."""
    owners = {child: (name, owner) for name, owner in model.named_modules() for child in owner.children()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and any(map(_is_layer, _children(module))):
            owner_name, owner = owners.get(module, (name, module))
            yield owner_name, owner, name, module


def _stack(owner_name: str, owner: nn.Module, container_name: str, container: nn.Module) -> Stack:
    layers = []
    for key, module in container._modules.items():
        path = f"{container_name}.{key}" if container_name else key
        if not _is_layer(module):
            raise ValueError(
                f"layer {path} is a {type(module).__name__}, which no adapter of coldstart/blocks.py understands, "
                "although its neighbours are Transformer layers; leave it out or write an adapter"
            )
        layers.append(_adapter(module)(path, module))
    return Stack(
        name=owner_name,
        layers=tuple(layers),
        embeddings=tuple(_embeddings(getattr(owner, "embed_tokens", None))),
        projections=tuple(_projections(owner)),
    )


def _children(container: nn.Module) -> list[nn.Module]:
    # Not by iteration: fairseq's LayerDropModuleList skips layers at random when iterated in training mode.
    return [child for child in container._modules.values() if child is not None]


def _is_layer(module: nn.Module) -> bool:
    return _adapter(module) is not None


def _adapter(module: nn.Module) -> Callable[[str, nn.Module], Layer] | None:
    """The function that reads a layer of this kind, or None where the module is none."""
    if hasattr(module, "self_attn"):
        return _fairseq_layer if hasattr(module, "fc1") else _torch_layer if hasattr(module, "linear1") else None
    return _timm_layer if hasattr(getattr(module, "attn", None), "qkv") and hasattr(module, "mlp") else None


# --- fairseq: TransformerEncoderLayerBase, TransformerDecoderLayerBase, MultiheadAttention ---


def _fairseq_layer(path: str, layer: nn.Module) -> Layer:
    cross = getattr(layer, "encoder_attn", None)
    names = {
        "self-attention": ("self_attn_layer_norm", "self_attn", "attn_ln"),
        "cross-attention": ("encoder_attn_layer_norm", "encoder_attn"),
        "feed-forward": ("final_layer_norm", "fc1", "ffn_layernorm", "fc2"),
    }
    return Layer(
        name=path,
        branches=_branches(path, layer, names, norm_first=_norm_first(layer)),
        self_attention=_fairseq_attention(f"{path}.self_attn", layer.self_attn),
        cross_attention=None if cross is None else _fairseq_attention(f"{path}.encoder_attn", cross),
        feed_forward=_feed_forward(path, layer.fc1, layer.fc2),
    )


def _fairseq_attention(path: str, attention: nn.Module) -> Attention:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    query, key, value, output = (projection.weight for projection in projections)
    query_bias, key_bias, value_bias, output_bias = (projection.bias for projection in projections)
    query_key = _present(query_bias, key_bias, attention.bias_k)
    value_output = _present(value_bias, output_bias, attention.bias_v)
    return Attention(path, attention.num_heads, query, key, value, output, query_key, value_output)


def _norms_after_branches(layer: nn.Module) -> list[str]:
    """The attribute names of the LayerNorms of a Post-LN layer, one after each branch, in the order of the branches."""
    if not hasattr(layer, "residual_connection"):
        raise ValueError(
            f"{type(layer).__name__} sums its branches where no weight can come between: "
            "residual weights need fairseq's layers"
        )
    if layer.normalize_before:
        raise ValueError(
            f"{type(layer).__name__} normalises before its branches (Pre-LN), but residual weights are for Post-LN"
        )
    names = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    return [name for name in names if getattr(layer, name, None) is not None]


def _leave_the_sum_to_the_norm(x, residual):
    """In the place of fairseq's ``residual_connection``, which a layer calls for all of its branches alike: the
    LayerNorm that comes next is the branch's own."""
    if torch.jit.is_scripting():
        return torch.stack((x, residual))
    else:  # TorchScript, where a name has one type, compiles the other branch alone
        return x, residual


def _embeddings(embed_tokens: nn.Module | None) -> Iterator[nn.Embedding]:
    """The embedding, or one for each band of fairseq's AdaptiveInput."""
    if embed_tokens is not None:
        yield from (module for module in embed_tokens.modules() if isinstance(module, nn.Embedding))


def _projections(owner: nn.Module) -> Iterator[Tensor]:
    for name in ("project_in_dim", "project_out_dim", "quant_noise"):
        projection = getattr(owner, name, None)
        if projection is not None:
            yield projection.weight
    for band in getattr(getattr(owner, "embed_tokens", None), "embeddings", ()):
        yield from (module.weight for module in band.modules() if isinstance(module, nn.Linear))


# --- torch.nn: TransformerEncoderLayer, TransformerDecoderLayer, MultiheadAttention ---


def _torch_layer(path: str, layer: nn.Module) -> Layer:
    cross = getattr(layer, "multihead_attn", None)
    names = {
        "self-attention": ("norm1", "self_attn"),
        "cross-attention": () if cross is None else ("norm2", "multihead_attn"),
        "feed-forward": ("norm2" if cross is None else "norm3", "linear1", "linear2"),
    }
    return Layer(
        name=path,
        branches=_branches(path, layer, names, norm_first=_norm_first(layer)),
        self_attention=_torch_attention(f"{path}.self_attn", layer.self_attn),
        cross_attention=None if cross is None else _torch_attention(f"{path}.multihead_attn", cross),
        feed_forward=_feed_forward(path, layer.linear1, layer.linear2),
    )


def _torch_attention(path: str, attention: nn.MultiheadAttention) -> Attention:
    if attention.in_proj_weight is not None:
        query, key, value = attention.in_proj_weight.chunk(3)
    else:
        query, key, value = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    query_bias, key_bias, value_bias = _thirds(attention.in_proj_bias)
    output = attention.out_proj
    query_key = _present(query_bias, key_bias, attention.bias_k)
    value_output = _present(value_bias, output.bias, attention.bias_v)
    return Attention(path, attention.num_heads, query, key, value, output.weight, query_key, value_output)


def _feed_forward(path: str, inner: nn.Linear, outer: nn.Linear) -> FeedForward:
    return FeedForward(path, inner.weight, outer.weight, _present(inner.bias, outer.bias))


# --- timm: vision_transformer.Block and its relatives ---


def _timm_layer(path: str, layer: nn.Module) -> Layer:
    attention = layer.attn
    query, key, value = attention.qkv.weight.chunk(3)
    query_bias, key_bias, value_bias = _thirds(attention.qkv.bias)
    output = attention.proj
    query_key, value_output = _present(query_bias, key_bias), _present(value_bias, output.bias)
    weights = (query, key, value, output.weight)
    post = type(layer).__name__.startswith("ResPost")  # normalises the branch, not what goes into it
    names = {
        "self-attention": ("attn", "norm1") if post else ("norm1", "attn", "ls1"),
        "feed-forward": ("mlp", "norm2") if post else ("norm2", "mlp", "ls2"),
    }
    return Layer(
        name=path,
        branches=_branches(path, layer, names, norm_first=True),
        self_attention=Attention(f"{path}.attn", attention.num_heads, *weights, query_key, value_output),
        cross_attention=None,
        feed_forward=_feed_forward(f"{path}.mlp", layer.mlp.fc1, layer.mlp.fc2),
    )


# --- what they share ---


def _norm_first(layer: nn.Module) -> bool:
    """Whether a layer is Pre-LN, as fairseq's Transformer, its wav2vec 2.0 and torch.nn call it; Post-LN otherwise."""
    return any(getattr(layer, name, False) for name in ("normalize_before", "layer_norm_first", "norm_first"))


def _branches(
    path: str, layer: nn.Module, names: dict[str, tuple[str, ...]], *, norm_first: bool
) -> tuple[Branch, ...]:
    """One branch for each kind, of the modules that the layer has; the first name is a norm, which belongs to the
    branch where it is ``norm_first``, and otherwise comes after the sum."""
    branches = []
    for kind, modules in names.items():
        called = modules if norm_first else modules[1:]
        present = tuple(f"{path}.{name}" for name in called if getattr(layer, name, None) is not None)
        if present:
            branches.append(Branch(kind, present))
    return tuple(branches)


def _thirds(bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if bias is None else bias.chunk(3)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
