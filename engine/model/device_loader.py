"""Brings a checkpoint's weights to a device, layer by layer, in one number format."""

import torch

from engine.model.device_llama import DeviceLayer, DeviceLlama, DeviceWeights, device_rotations
from engine.model.linear import Float32Linear, Linear
from engine.model.loader import LayerLoader
from engine.model.rotary import rotary_table
from engine.model.shards import WHOLE
from model_files import ModelFiles


def load_device_model(
    files: ModelFiles, *, max_positions: int, device: torch.device, dtype: torch.dtype
) -> DeviceLlama:
    """The model of `files` for positions below `max_positions`; `ModelFilesError` as `load_model`."""
    config = files.config()
    loader = LayerLoader(config, files.weights(), Float32Linear, WHOLE, None)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype)

    def put_linear(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(linear, Float32Linear)
        return put(linear.weight), None if linear.bias is None else put(linear.bias)

    def put_layer(index: int) -> DeviceLayer:
        layer = loader.layer(index)
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        qkv, output, gate_up, down = map(put_linear, linears)
        return DeviceLayer(
            input_norm=put(layer.input_norm),
            qkv=qkv[0],
            qkv_bias=qkv[1],
            qk_norm=None if layer.qk_norm is None else put(layer.qk_norm),
            output=output[0],
            output_bias=output[1],
            mlp_norm=put(layer.mlp_norm),
            gate_up=gate_up[0],
            gate_up_bias=gate_up[1],
            down=down[0],
            down_bias=down[1],
        )

    embedding = put(loader.embedding)
    return DeviceLlama(
        config,
        DeviceWeights(
            embedding=embedding,
            rotations=device_rotations(rotary_table(config, max_positions), device),
            layers=tuple(map(put_layer, range(config.num_layers))),
            final_norm=put(loader.tensor("model.norm.weight", config.hidden_size)),
            head=embedding if config.tie_word_embeddings else put_linear(loader.head())[0],
        ),
    )
