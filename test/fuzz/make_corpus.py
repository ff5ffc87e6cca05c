#!/usr/bin/env python3
"""Makes the fuzz targets' seed inputs: make_corpus.py test/fuzz/corpus. Small, each valid or nearly so."""
import json
import pathlib
import struct
import sys


def llmc(L, NH, C, T, V, Vp, version=3):
    n = (Vp + T) * C + L * (12 * C * C + 13 * C) + 2 * C
    return struct.pack("<256i", 20240326, version, T, V, L, NH, C, Vp, *([0] * 248)) + bytes(n * (4 if version == 3 else 2))


def safetensors(tensors, metadata=None):
    size = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I64": 8}
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape) in tensors.items():
        n = size[dtype]
        for extent in shape:
            n *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(i % 251 for i in range(at))


def gpt2(prefix, C=1, V=2, T=1):
    shapes = {"wte.weight": [V, C], "wpe.weight": [T, C], "ln_f.weight": [C], "ln_f.bias": [C]}
    for name, shape in (("ln_1.weight", [C]), ("ln_1.bias", [C]), ("attn.c_attn.weight", [C, 3 * C]),
                        ("attn.c_attn.bias", [3 * C]), ("attn.c_proj.weight", [C, C]), ("attn.c_proj.bias", [C]),
                        ("ln_2.weight", [C]), ("ln_2.bias", [C]), ("mlp.c_fc.weight", [C, 4 * C]),
                        ("mlp.c_fc.bias", [4 * C]), ("mlp.c_proj.weight", [4 * C, C]), ("mlp.c_proj.bias", [C])):
        shapes["h.0." + name] = shape
    return safetensors({prefix + name: ("BF16", shape) for name, shape in shapes.items()})


def huggingface(weights, index=False, **shape):
    config = json.dumps({"n_layer": 1, "n_head": 1, "n_embd": 1, "n_positions": 1, "vocab_size": 2, **shape}).encode()
    config += b" " * (len(config) % 2 ^ index)  # an odd length: an index
    return struct.pack("<H", len(config)) + config + weights


def hellaswag(examples):
    stream, longest = [], 0
    for number, (label, context, endings) in enumerate(examples):
        one = [65535, 0, number, label, 4, len(context), *context]
        for ending in endings:
            one += [len(ending), *ending]
        one[1] = 2 * len(one)
        longest = max(longest, one[1])
        stream += one
    return struct.pack("<256i", 20240522, 1, len(examples), longest, *([0] * 252)) + struct.pack(f"<{len(stream)}H", *stream)


def shard(magic, version, width, tokens):
    return struct.pack("<256i", magic, version, len(tokens), *([0] * 253)) + struct.pack(f"<{len(tokens)}{width}", *tokens)


def manifest(tensor=1, data=1, pipeline=1, group=1, **more):
    one = {"bytes": 100, "checksum": "0123456789abcdef"}
    return json.dumps({
        "format": 1, "step": 9, "updates": 9, "bad_steps": 0, "log_bytes": 99,
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 8, "context_length": 4, "vocab_size": 5},
        "grid": {"tensor_parallel": tensor, "data_parallel": data, "pipeline_parallel": pipeline, "pipeline_chunks": 1,
                 "shard_group": group},
        "data": {"bytes": 7, "seed": 1, "tokens_per_step": 8, "sequence_length": 4, "hash": "fedcba9876543210"},
        "files": [one] * (tensor * data * pipeline), "config": {"run": {"steps": 5}}, **more}).encode()


CORPUS = {
    "manifest": {
        "one": manifest(train_loss=0.25),
        "many": manifest(tensor=2, data=4, pipeline=2, group=2),
        "wrong": manifest(data=3, group=2),
    },
    "safetensors": {
        "none": safetensors({}),
        "two": safetensors({"a": ("F32", [2, 3]), "b.weight": ("BF16", [5])}, {"format": "pt"}),
        "kinds": safetensors({"h": ("F16", [3]), "e": ("F32", [0, 4]), "s": ("F32", []), "u": ("U8", [1, 7]), "i": ("I64", [2])}),
    },
    "llmc": {
        "fp32": llmc(1, 1, 1, 1, 2, 2),
        "bf16": llmc(2, 2, 4, 3, 5, 8, version=5),
    },
    "huggingface": {
        "prefix": huggingface(gpt2("transformer.")),
        "plain": huggingface(gpt2(""), activation_function="gelu_new", n_inner=None, layer_norm_epsilon=1e-5),
        "index": huggingface(b'{"weight_map":{"wte.weight":"shard.safetensors"}}', index=True),
    },
    "hellaswag": {
        "one": hellaswag([(1, [5], [[1], [2, 3], [4], [6]])]),
        "three": hellaswag([(i, [7, 8, 9], [[10 + i, 11], [12], [13, 14, 15], [50256]]) for i in range(3)]),
    },
    "shard": {
        "uint16": shard(20240520, 1, "H", [50256 * (i % 2) for i in range(40)]),
        "uint32": shard(20240801, 7, "I", [100 * i for i in range(40)] + [60000]),
        "text": b"To be, or not to be, that is the question.\n",
    },
    "config": {
        "long": b'{"data": {"train_data": "' + b"x" * 1023 + b'"}}',
        "preset": b'{"model": {"preset": "gpt2-124M", "n_layer": 3}, "run": {"steps": 1e1, "seed": 9007199254740991}}',
        "all": b'{"data": {"train_data": "a\\u00e4\\n\\"b"}, "parallel": {"shard_group": "node", "overlap": false},'
               b' "optimizer": {"epsilon": 1e-12, "beta2": 0.999}, "published": {"x": [1, {"y": null}]}}',
    },
}


def main():
    for target, inputs in CORPUS.items():
        folder = pathlib.Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
