#!/usr/bin/env python3
"""GPT-2 124M in PyTorch on one GPU, tuned: bf16 autocast, flash attention, fused AdamW, torch.compile.

    python3 dev/bench_torch.py [--micro-batch B] [--sequence-length T] [--steps N] [--no-compile]

Prints tokens/s from the median step, for comparison with ./train_gpt on the same batch.
"""
import argparse
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers=12, heads=12, width=768, length=1024, vocabulary=50304):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.final(x), self.wte.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_torch.py: PyTorch finds no GPU")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = GPT(length=arguments.sequence_length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = model if arguments.no_compile else torch.compile(model)
    shape = (arguments.micro_batch, arguments.sequence_length)
    tokens, targets = (torch.randint(0, 50257, shape, device="cuda") for _ in range(2))
    times = []
    for step in range(arguments.steps + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 5:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    how = "eager" if arguments.no_compile else "torch.compile"
    print(f"{shape[0] * shape[1] / seconds:.0f} tokens/s, {seconds * 1e3:.2f} ms a step, "
          f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB (PyTorch {torch.__version__}, {how})")


if __name__ == "__main__":
    main()
