#!/usr/bin/env python3
"""A GPT-2 training step in PyTorch on the CPU, for dev/bench_cpu.py to time beside this program's.

    python3 dev/bench_torch_cpu.py '{"layers": 12, "heads": 12, "width": 768, "vocabulary": 50257, "batch": 4,
                                     "length": 256, "precision": "bf16", "threads": 2}'

For every number N that it reads, it runs N steps and prints their milliseconds and its peak memory as a line of JSON.
bf16 is autocast, as PyTorch's users run it. Gradients are not clipped, which the program does. There is no attention
kernel: the PyTorch of Debian 12 has none for the CPU.
"""
import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(width, dim=2))
        scores = (q @ k.transpose(2, 3)) * (1 / math.sqrt(width // self.heads))
        weights = scores.masked_fill(self.future, float("-inf")).softmax(dim=-1)
        x = x + self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, heads, width, vocabulary, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, length) for _ in range(layers)))
        self.final = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.blocks(self.wte(tokens) + self.wpe.weight)
        logits = functional.linear(self.final(x), self.wte.weight)
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def peak_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main():
    run = json.loads(sys.argv[1])
    torch.manual_seed(1)
    torch.set_num_threads(run["threads"])
    model = GPT(run["layers"], run["heads"], run["width"], run["vocabulary"], run["length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, targets = (torch.randint(0, run["vocabulary"], (run["batch"], run["length"])) for _ in range(2))
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run["precision"] == "bf16"):
                loss = model(tokens, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - begin))
        print(json.dumps({"ms": times, "memory": peak_memory(), "version": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
