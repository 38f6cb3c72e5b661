"""Builds a transformers model from a checkpoint's configuration and our readers' tensors."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelNotSupportedError
from engine.model.linear import Linear, WeightFormat, make_linear
from model_files import ModelFiles, ModelFilesError, Weights

logger = logging.getLogger(__name__)


def load_transformers_model(files: ModelFiles, weight_format: WeightFormat) -> PreTrainedModel:
    """In float32 and eval mode; linear layers in `weight_format`.

    ModelNotSupportedError says why transformers cannot compute it, ModelFilesError names missing tensors.
    """
    model_class = _model_class(files.source_config())
    # The readers' tensors are plain numbers, however they are stored.
    fields = {key: value for key, value in files.source_config().items() if key != "quantization_config"}
    config = model_class.config_class.from_dict(fields)
    quiet = transformers.utils.logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    try:
        model, loaded = model_class.from_pretrained(
            None,
            config=config,
            state_dict=_tensors(files.weights()),
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a model's own code raises
        raise ModelNotSupportedError(f"transformers cannot build it ({_one_line(error)})") from error
    missing = sorted({*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])})
    if missing:
        raise ModelFilesError(
            f"{len(missing)} tensors such as {missing[0]} are missing or of another shape than the model's "
            "configuration says; use files that belong together"
        )
    model.eval().requires_grad_(False)
    pack_linear_layers(model, weight_format)
    return model


def pack_linear_layers(model: nn.Module, weight_format: WeightFormat) -> None:
    """Puts every `nn.Linear` into the weight format; nothing to do for fp32."""
    if weight_format == "fp32":
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(make_linear(child.weight, child.bias, weight_format)))


class PackedLinear(nn.Module):
    """A layer of ours in the place of transformers' own."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return self._linear(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)


def _model_class(config: Mapping[str, object]) -> type[PreTrainedModel]:
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelNotSupportedError(f"transformers {transformers.__version__} has no such model")
    return model_class


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: _tensor(weights, name) for name in weights.names()}


def _tensor(weights: Weights, name: str) -> torch.Tensor:
    integers = weights.get_integers(name)
    if integers is not None:
        return torch.from_numpy(np.array(integers))
    values = weights.get(name)
    return torch.from_numpy(values if values.flags.writeable else np.array(values))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
