#!/usr/bin/env python3
"""Makes the small models in test/golden/hf that the readers of foreign formats are held to, with the real libraries.

    python3 -m venv --system-site-packages venv          over the system's PyTorch, for instance Debian's 1.13
    venv/bin/pip install 'transformers==4.35.2'
    venv/bin/python dev/make_hf_goldens.py test/golden/hf

Not part of any test: the files are committed. One GPT-2 with random weights, written several ways:

    fp32/         GPT2LMHeadModel.save_pretrained: names with "transformer.", head tied and not stored
    sharded/      the same in several files with an index
    bf16/, fp16/  GPT2Model.half() and so on: names without the prefix
    buffers/      fp32 without the prefix, with the buffers that old versions stored, and with lm_head.weight
    fp32.bin, bf16.bin   the same weights in llm.c's form, written here from its description, by other means than
                  the program's: every element can be compared between the two forms
    expected.json  tokens, logits, loss, norm of the gradient, and losses over AdamW steps, in float64: a batch for
                   each step, and the first batch in every step, as a run has it whose data are one batch long
"""
import copy
import json
import pathlib
import shutil
import struct
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SHAPE = dict(n_layer=2, n_head=2, n_embd=8, n_positions=8, vocab_size=13)
OPTIMIZER = dict(learning_rate=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, grad_clip=1.0)
STEPS = 4


def make_model():
    torch.manual_seed(20)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                                     eos_token_id=None, **SHAPE)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():  # nothing at zero or one, so that no mistake in the order of tensors goes unseen
        for name, parameter in model.named_parameters():
            norm = ".ln_" in name and name.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (1.0 if norm else 0.0))
    return model


def write_llmc(model, path, version, dtype):
    tensors = {name.replace("transformer.", ""): value.detach() for name, value in model.named_parameters()}
    vocab, padded = SHAPE["vocab_size"], 128
    parts = [torch.cat([tensors["wte.weight"], torch.zeros(padded - vocab, SHAPE["n_embd"])]), tensors["wpe.weight"]]
    for name in ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
                 "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
                 "mlp.c_proj.weight", "mlp.c_proj.bias"):
        for layer in range(SHAPE["n_layer"]):
            value = tensors[f"h.{layer}.{name}"]
            parts.append(value.t() if value.dim() == 2 else value)
    parts += [tensors["ln_f.weight"], tensors["ln_f.bias"]]
    header = [20240326, version, SHAPE["n_positions"], vocab, SHAPE["n_layer"], SHAPE["n_head"], SHAPE["n_embd"], padded]
    with open(path, "wb") as out:
        out.write(struct.pack("<256i", *header, *([0] * (256 - len(header)))))
        for part in parts:
            part = part.contiguous().to(dtype)
            out.write((part if dtype == torch.float32 else part.view(torch.int16)).numpy().tobytes())


def train(model, batches):
    """Steps in float64: AdamW with decay on matrices only, the gradient clipped by its global norm."""
    model = copy.deepcopy(model).double()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
                                   {"params": vectors, "weight_decay": 0.0}], lr=OPTIMIZER["learning_rate"],
                                  betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["epsilon"])
    losses, norms = [], []
    for step in range(len(batches)):
        logits = model(batches[step, :, :-1]).logits
        if step == 0:
            first = logits.detach().numpy()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batches[step, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"]).item())
        optimizer.step()
        losses.append(loss.item())
    return first, losses, norms


def expected(model):
    torch.manual_seed(21)
    B, T = 3, SHAPE["n_positions"]
    batches = torch.randint(0, SHAPE["vocab_size"], (STEPS, B, T + 1))
    first, losses, norms = train(model, batches)
    _, repeated_losses, repeated_norms = train(model, batches[:1].expand(STEPS, B, T + 1))
    return {"about": f"dev/make_hf_goldens.py with transformers {transformers.__version__}, PyTorch {torch.__version__}",
            "shape": SHAPE, "optimizer": OPTIMIZER, "B": B, "T": T, "batches": batches.tolist(),
            "logits": [float(f"{x:.9g}") for x in first.flatten()], "losses": losses, "norms": norms,
            "repeated_losses": repeated_losses, "repeated_norms": repeated_norms}


def main():
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make_model()
    model.save_pretrained(folder / "fp32", safe_serialization=True)
    model.save_pretrained(folder / "sharded", safe_serialization=True, max_shard_size="3KB")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        half = make_model().to(dtype)
        half.config.torch_dtype = dtype
        half.transformer.save_pretrained(folder / name, safe_serialization=True)
    buffers = {name.replace("transformer.", ""): value.clone() for name, value in model.named_parameters()}
    buffers["lm_head.weight"] = buffers["wte.weight"].clone()
    n = SHAPE["n_positions"]
    for layer in range(SHAPE["n_layer"]):
        buffers[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(n, n, dtype=torch.uint8)).view(1, 1, n, n)
        buffers[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    (folder / "buffers").mkdir()
    save_file(buffers, str(folder / "buffers/model.safetensors"))
    shutil.copy(folder / "fp32/config.json", folder / "buffers/config.json")
    write_llmc(model, folder / "fp32.bin", 3, torch.float32)
    write_llmc(model, folder / "bf16.bin", 5, torch.bfloat16)
    for path in folder.glob("*/generation_config.json"):
        path.unlink()
    # It loads again, in the real library, as the same model.
    again = transformers.GPT2LMHeadModel.from_pretrained(folder / "fp32")
    assert all(np.array_equal(a.detach().numpy(), b.detach().numpy())
               for a, b in zip(model.parameters(), again.parameters()))
    (folder / "expected.json").write_text(json.dumps(expected(model), indent=0, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
