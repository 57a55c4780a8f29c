"""Copies of a tiny checkpoint as MLX writes them: affine quantisation of 2 to 8 bits, and its layout of qwen3_5.

Needs torch. Everything returned comes with `exact`, the float64 values that the stored bytes stand for, so that a
reference forward can be made of the very same weights.
"""
import torch

FLOAT = (torch.bfloat16, torch.float16, torch.float32)


def pack(codes, bits):
    """[rows, K] integers -> U32 [rows, K * bits / 32]: one bit stream a row, lowest bit first."""
    rows, count = codes.shape
    stream = ((codes[..., None] >> torch.arange(bits)) & 1).reshape(rows, count * bits // 32, 32)
    words = (stream << torch.arange(32)).sum(-1)
    return words.to(torch.uint32)


def quantise(weight, bits, group, dtype=torch.bfloat16):
    """MLX's affine quantiser -> (packed, scales, biases, exact): w = scale * q + bias, in groups along K."""
    rows, count = weight.shape
    levels = 2**bits - 1
    x = weight.double().reshape(rows, count // group, group)
    low, high = x.amin(-1), x.amax(-1)
    scale = ((high - low) / levels).clamp(min=1e-7)
    bottom = low.abs() > high.abs()
    scale = torch.where(bottom, scale, -scale)
    edge = torch.where(bottom, low, high)  # this end of the range is kept exactly
    q0 = (edge / scale).round()
    scale = torch.where(q0 != 0, edge / torch.where(q0 != 0, q0, 1), scale).to(dtype)
    bias = torch.where(q0 != 0, edge, 0.0).to(dtype)
    wide, add = scale.double()[..., None], bias.double()[..., None]
    codes = ((x - add) / torch.where(wide == 0, 1.0, wide)).round().clamp(0, levels).long()
    exact = (wide * codes + add).reshape(rows, count)
    return pack(codes.reshape(rows, count), bits), scale, bias, exact


def is_matrix(name, tensor):
    """What MLX quantises: the weights of Linear and Embedding."""
    return tensor.dim() == 2 and name.endswith(".weight") and "norm" not in name and "conv1d" not in name


def quantised(tensors, bits, group, overrides=None, dtype=torch.bfloat16):
    """-> (tensors as stored, exact values of those that changed, the config's "quantization")."""
    overrides = overrides or {}
    stored, exact = dict(tensors), {}
    config = {"group_size": group, "bits": bits, "mode": "affine"}
    for name, tensor in tensors.items():
        if not is_matrix(name, tensor):
            continue
        module = name.removesuffix(".weight")
        own = overrides.get(module, (bits, group))
        if module in overrides:
            config[module] = {"group_size": own[1], "bits": own[0]} if own else False
        if not own:
            continue
        packed, scales, biases, exact[name] = quantise(tensor, *own, dtype)
        stored[name], stored[module + ".scales"], stored[module + ".biases"] = packed, scales, biases
    return stored, exact, config


PLUS_ONE = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
            "language_model.model.norm.weight")


def mlx_name(name):
    """model.language_model.X -> language_model.model.X, lm_head -> language_model.lm_head."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return "language_model." + name


def qwen3_5_layout(tensors):
    """What MLX's conversion makes of a qwen3_5 checkpoint -> (tensors, exact values by the NEW name of changed norms).

    No vision tower, no MTP layer; convolutions [C, 1, 4] -> [C, 4, 1]; one is added to the zero-centred norms.
    """
    out, exact = {}, {}
    for name, tensor in tensors.items():
        if ".visual." in name or name.startswith("mtp."):
            continue
        name = mlx_name(name)
        if name.endswith("conv1d.weight"):
            tensor = tensor.transpose(1, 2).contiguous()
        if name.endswith(PLUS_ONE):
            tensor = (tensor.float() + 1).to(tensor.dtype)
            exact[name] = tensor.double() - 1  # the sum was rounded: this is what is stored now
        out[name] = tensor
    return out, exact
