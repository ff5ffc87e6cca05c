#!/usr/bin/env python3
"""The model's reference: GPT-2 in PyTorch, in float64, and the golden files that the C tests are held to.

    reference.py --write test/golden            compute every case below and write its golden file
    reference.py --check test/golden            compute them anew and compare with the files
    reference.py --case V,C,NH,L,B,T,CONTEXT    one golden file for any shape, to standard output (or --out FILE)
    reference.py --self-test                    check this reference itself, by independent means

A golden file holds no weights and no gradients, so it stays small for any model:

- Weights and tokens are values of a hash, the same few lines of integers here and in test/unit/golden.h (see
  hash_words(), Case.weight(), Case.batch()). Weights are small odd integers times a power of two, exact in float32 and
  in bf16, so one file serves every precision. Checksums in the file show that both sides mean the same numbers.
- A gradient is stored as its norm and PROJECTIONS inner products with vectors of random signs (see project()). For a
  difference d between two gradients, each inner product <d, signs> has mean 0 and mean square |d|^2, so
  sqrt(mean of squares of the differences of the projections) estimates |d|: Johnson and Lindenstrauss, "Extensions of
  Lipschitz mappings into a Hilbert space", 1984; with signs: Achlioptas, "Database-friendly random projections", 2003.
  The estimate of |d|^2 has a relative standard deviation of at most sqrt(2 / 64) = 18 %, that of |d| 9 %. For it to
  come out below half of |d| the mean of 64 squares must be a quarter of its expectation, which has a probability below
  exp(-32 (ln 4 - 3/4)) = 1.5e-9. So a gradient whose error is twice the bound fails, one with half of it passes, and
  a wrong element is seen wherever in the tensor it is.

Tensor ids: 0 wte, 1 wpe, 2 + 12 l + k for tensor k of block l in the order of BLOCK_TENSORS, then the last layer norm.

The optimizer: AdamW as PyTorch has it (checked against torch.optim.AdamW by --self-test), decay on matrices only,
gradients multiplied by clip / norm when their global norm exceeds clip. Hyper-parameters are rounded to float32, as the
program holds them. Every step draws a fresh batch; a step's loss and norm are those before its update.
"""
import argparse
import json
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

PROJECTIONS = 64
LAYERNORM_EPSILON = 1e-5
DEFAULT_OPTIMIZER = dict(learning_rate=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, grad_clip=1.0)

# Hash streams. To each is added the number of the tensor or of the step.
STREAM_WEIGHTS, STREAM_SIGNS, STREAM_TOKENS, STREAM_CHECK_WEIGHTS, STREAM_CHECK_TOKENS = (n << 32 for n in range(5))

# name, shape as multiples of C, kind; matrices first, as the program's layout has them.
BLOCK_TENSORS = [
    ("qkv_weight", (3, 1), "matrix"),
    ("attproj_weight", (1, 1), "matrix"),
    ("mlp_weight", (4, 1), "matrix"),
    ("mlpproj_weight", (1, 4), "matrix"),
    ("qkv_bias", (3,), "bias"),
    ("mlp_bias", (4,), "bias"),
    ("ln1_weight", (1,), "norm"),
    ("ln1_bias", (1,), "bias"),
    ("attproj_bias", (1,), "bias"),
    ("ln2_weight", (1,), "norm"),
    ("ln2_bias", (1,), "bias"),
    ("mlpproj_bias", (1,), "bias"),
]

# The committed cases. Each asks something of the program that the others do not.
CASES = {
    # T no multiple of 8, a vocabulary with more padding than half, several blocks.
    "odd": dict(V=65, C=48, NH=3, L=2, B=2, T=13),
    # One token: attention over itself alone, sums over one row.
    "single_token": dict(V=256, C=64, NH=4, L=2, B=1, T=1, learning_rate=3e-4),
    # GPT-2 XL's width and its 25 heads.
    "wide": dict(V=65, C=1600, NH=25, L=1, B=2, T=8, steps=3, learning_rate=2e-5),
    # GPT-2's vocabulary.
    "large_vocabulary": dict(V=50257, C=32, NH=2, L=1, B=1, T=9, steps=5),
    # A small model as people train it.
    "plain": dict(V=256, C=128, NH=4, L=4, B=4, T=64, learning_rate=3e-4),
    # Sequences shorter than the context: the last rows of wpe get no gradient, only decay. The optimizer's settings are
    # unusual on purpose: with a large epsilon AdamW is no longer blind to the scale of gradients, so clipping shows.
    "short_sequence": dict(V=65, C=64, NH=2, L=2, B=3, T=20, context=32, beta1=0.8, beta2=0.95, epsilon=1e-3,
                           weight_decay=1.0, grad_clip=0.5),
    # Nothing is a multiple of 8: heads of 11 channels, rows of 55.
    "odd_heads": dict(V=65, C=55, NH=5, L=2, B=2, T=20),
}


def mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) on an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_words(seed, stream, first, count):
    """Words first ... first + count - 1 of a stream: uint64."""
    key = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(stream))
    return mix(key + np.arange(first, first + count, dtype=np.uint64))


def checksum(seed, stream, bits):
    """A sum, modulo 2^64, of 32-bit values, each hashed with its place."""
    total = 0
    for first in range(0, len(bits), 1 << 20):
        part = bits[first:first + (1 << 20)].astype(np.uint64)
        total += int(mix(hash_words(seed, stream, first, len(part)) + part).sum(dtype=np.uint64))
    return total % 2**64


class Case:
    """A shape, hyper-parameters, and the weights and batches that follow from them."""

    def __init__(self, V, C, NH, L, B, T, context=None, steps=10, seed=1337, **optimizer):
        self.V, self.C, self.NH, self.L, self.B, self.T = V, C, NH, L, B, T
        self.context = context or T
        self.steps, self.seed = steps, seed
        self.optimizer = {**DEFAULT_OPTIMIZER, **optimizer}
        if C % NH or T > self.context or min(V, C, NH, L, B, T) < 1:
            raise ValueError("heads must divide C, T must fit the context, and everything be at least 1")
        # Matrices: odd integers up to 127 have a standard deviation of 73.6; scaled to a standard deviation near
        # 1 / sqrt(C), products keep the scale of their input, so queries, keys and every block matter to the loss.
        self.weight_exponent = -round(math.log2(73.6 * math.sqrt(C)))
        self.tensors = [("wte", (V, C), "matrix"), ("wpe", (self.context, C), "matrix")]
        for block in range(L):
            self.tensors += [("h%d.%s" % (block, name), tuple(n * C for n in shape), kind)
                             for name, shape, kind in BLOCK_TENSORS]
        self.tensors += [("lnf_weight", (C,), "norm"), ("lnf_bias", (C,), "bias")]

    def weight(self, tensor):
        """Tensor `tensor`'s initial values: float32, exact in bf16 too."""
        _, shape, kind = self.tensors[tensor]
        words = hash_words(self.seed, STREAM_WEIGHTS + tensor, 0, math.prod(shape))
        top = (words >> np.uint64(57)).astype(np.int32)  # 0 ... 127
        if kind == "norm":
            values = (96 + top // 2) * 2.0**-7  # 0.75 to 1.24
        else:
            values = (2 * top - 127) * 2.0**(-10 if kind == "bias" else self.weight_exponent)
        return values.astype(np.float32).reshape(shape)

    def batch(self, step):
        """Tokens and targets (B, T) of a step: windows of T + 1 tokens, the targets one ahead. The smaller of two
        uniform tokens is drawn, so that there is a distribution to learn and steps do more to the loss than noise."""
        count = self.B * (self.T + 1)
        words = hash_words(self.seed, STREAM_TOKENS + step, 0, count)
        low, high = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
        tokens = np.minimum(low % np.uint64(self.V), high % np.uint64(self.V))
        window = tokens.astype(np.int64).reshape(self.B, self.T + 1)
        return window[:, :-1], window[:, 1:]

    def weights_checksum(self):
        return sum(checksum(self.seed, STREAM_CHECK_WEIGHTS + t, self.weight(t).ravel().view(np.uint32))
                   for t in range(len(self.tensors))) % 2**64

    def tokens_checksum(self):
        """Of the tokens of every step, followed by its targets."""
        return sum(checksum(self.seed, STREAM_CHECK_TOKENS + step, np.stack(self.batch(step)).ravel())
                   for step in range(self.steps)) % 2**64


def losses(case, params, tokens, targets):
    """Forward: the mean loss. params: tensors by id. tokens, targets (B, T)."""
    B, T, C, NH = case.B, case.T, case.C, case.NH
    x = params[0][tokens] + params[1][:T]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    for block in range(case.L):
        (qkv_w, proj_w, mlp_w, mlp_proj_w, qkv_b, mlp_b, ln1_w, ln1_b, proj_b, ln2_w, ln2_b,
         mlp_proj_b) = params[2 + 12 * block:14 + 12 * block]
        h = F.layer_norm(x, (C,), ln1_w, ln1_b, LAYERNORM_EPSILON)
        q, k, v = F.linear(h, qkv_w, qkv_b).view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4)  # each (B, NH, T, HS)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(C // NH)
        attention = torch.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1) @ v
        x = x + F.linear(attention.transpose(1, 2).reshape(B, T, C), proj_w, proj_b)
        h = F.layer_norm(x, (C,), ln2_w, ln2_b, LAYERNORM_EPSILON)
        x = x + F.linear(F.gelu(F.linear(h, mlp_w, mlp_b), approximate="tanh"), mlp_proj_w, mlp_proj_b)
    x = F.layer_norm(x, (C,), params[-2], params[-1], LAYERNORM_EPSILON)
    return F.cross_entropy(F.linear(x, params[0]).view(B * T, case.V), targets.reshape(B * T))


def initial_params(case, dtype=torch.float64):
    return [torch.from_numpy(case.weight(t)).to(dtype).requires_grad_() for t in range(len(case.tensors))]


def loss_and_gradients(case, params, step):
    tokens, targets = (torch.from_numpy(x.copy()) for x in case.batch(step))
    loss = losses(case, params, tokens, targets)
    gradients = torch.autograd.grad(loss, params)
    return loss.item(), gradients


def adamw_step(case, params, m, v, gradients, norm, step):
    """In place; step counts from 1. Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019."""
    lr, beta1, beta2, epsilon, decay, clip = (float(np.float32(case.optimizer[name])) for name in DEFAULT_OPTIMIZER)
    scale = clip / norm if norm > clip else 1.0
    with torch.no_grad():
        for t, (_, _, kind) in enumerate(case.tensors):
            g = gradients[t] * scale
            m[t].mul_(beta1).add_(g, alpha=1 - beta1)
            v[t].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            if kind == "matrix":
                params[t].mul_(1 - lr * decay)
            params[t].sub_(lr * (m[t] / (1 - beta1**step)) / ((v[t] / (1 - beta2**step)).sqrt() + epsilon))


def project(case, tensor, gradient):
    """Inner products of a gradient with PROJECTIONS vectors of signs: bit j of element i's word tells whether
    projection j adds (1) or subtracts (0) the element. Summed by the value of each byte of the words first, which is 8
    sums per element instead of 64, and then over the 256 values."""
    gradient = gradient.detach().numpy().ravel()
    by_byte = np.zeros((8, 256))
    for first in range(0, len(gradient), 1 << 20):
        part = gradient[first:first + (1 << 20)]
        words = hash_words(case.seed, STREAM_SIGNS + tensor, first, len(part))
        for byte in range(8):
            values = ((words >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.intp)
            by_byte[byte] += np.bincount(values, weights=part, minlength=256)
    signs = ((np.arange(256)[:, None] >> np.arange(8)) & 1) * 2.0 - 1.0  # (256, 8)
    return (by_byte @ signs).ravel()


def golden(case):
    """Everything that a golden file holds."""
    params = initial_params(case)
    m = [torch.zeros_like(p, requires_grad=False) for p in params]
    v = [torch.zeros_like(p, requires_grad=False) for p in params]
    tensors, steps = [], []
    for step in range(case.steps):
        loss, gradients = loss_and_gradients(case, params, step)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        steps.append({"loss": loss, "gradient_norm": norm})
        if step == 0:
            for t, (name, shape, _) in enumerate(case.tensors):
                # 13 digits are plenty for what bounds of 1e-5 are tested with, and make files a quarter smaller.
                tensors.append({"name": name, "shape": shape, "norm": gradients[t].norm().item(),
                                "projections": [float("%.13g" % x) for x in project(case, t, gradients[t])]})
        adamw_step(case, params, m, v, gradients, norm, step + 1)
    return {"about": "made by dev/reference.py, which explains it",
            "shape": {"vocab_size": case.V, "n_embd": case.C, "n_head": case.NH, "n_layer": case.L,
                      "context_length": case.context, "micro_batch": case.B, "sequence_length": case.T},
            "seed": case.seed, "weight_exponent": case.weight_exponent,
            "weights_checksum": "%016x" % case.weights_checksum(), "tokens_checksum": "%016x" % case.tokens_checksum(),
            "optimizer": case.optimizer, "steps": steps, "tensors": tensors}


def to_text(record):
    """JSON with one tensor or step a line. Python prints a double with the digits that give it back exactly."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list):
            value = "[\n  %s\n ]" % ",\n  ".join(json.dumps(x) for x in value)
        else:
            value = json.dumps(value)
        lines.append(' "%s": %s' % (key, value))
    return "{\n%s\n}\n" % ",\n".join(lines)


def differences(now, stored):
    """What differs between two golden records, as lines of text. Both were computed in float64: what another version of
    PyTorch or another order of summation does is near 1e-14, grown by some steps of training."""
    found = []
    for key in sorted(set(now) | set(stored)):
        if key not in ("steps", "tensors") and json.loads(json.dumps(now.get(key))) != stored.get(key):
            found.append("%s is %s, in the file %s" % (key, now.get(key), stored.get(key)))
    if found or len(now["steps"]) != len(stored["steps"]) or len(now["tensors"]) != len(stored["tensors"]):
        return found + ["not the same case"]
    for i, (a, b) in enumerate(zip(now["steps"], stored["steps"])):
        for key in a:
            if not abs(a[key] - b[key]) <= 1e-11 * abs(b[key]):
                found.append("step %d: %s is %.17g, in the file %.17g" % (i, key, a[key], b[key]))
    for a, b in zip(now["tensors"], stored["tensors"]):
        if a["name"] != b["name"] or list(a["shape"]) != b["shape"]:
            found.append("tensor %s %s, in the file %s %s" % (a["name"], a["shape"], b["name"], b["shape"]))
        error = np.abs(np.subtract(a["projections"], b["projections"])).max() + abs(a["norm"] - b["norm"])
        if not error <= 1e-11 * b["norm"]:
            found.append("gradient of %s differs by %.1e of its norm" % (a["name"], error / b["norm"]))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The reference checked by other means.


def loss_in_numpy(case, weights, tokens, targets):
    """The same model once more, row by row from its formulas, with nothing of PyTorch's."""
    w = [x.astype(np.float64) for x in weights]
    HS = case.C // case.NH

    def layer_norm(row, weight, bias):
        centred = row - sum(row) / len(row)
        return centred / math.sqrt(sum(centred**2) / len(row) + 1e-5) * weight + bias

    total = 0.0
    for b in range(case.B):
        x = [w[0][tokens[b, t]] + w[1][t] for t in range(case.T)]
        for block in range(case.L):
            (qkv_w, proj_w, mlp_w, mlp_proj_w, qkv_b, mlp_b, ln1_w, ln1_b, proj_b, ln2_w, ln2_b,
             mlp_proj_b) = w[2 + 12 * block:14 + 12 * block]
            qkv = [qkv_w @ layer_norm(row, ln1_w, ln1_b) + qkv_b for row in x]
            for t in range(case.T):
                out = np.zeros(case.C)
                for head in range(case.NH):
                    at = head * HS
                    q = qkv[t][at:at + HS]
                    p = [math.exp(q @ qkv[s][case.C + at:case.C + at + HS] / math.sqrt(HS)) for s in range(t + 1)]
                    for s in range(t + 1):
                        out[at:at + HS] += p[s] / sum(p) * qkv[s][2 * case.C + at:2 * case.C + at + HS]
                x[t] = x[t] + proj_w @ out + proj_b
                u = mlp_w @ layer_norm(x[t], ln2_w, ln2_b) + mlp_b
                u = 0.5 * u * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)))
                x[t] = x[t] + mlp_proj_w @ u + mlp_proj_b
        for t in range(case.T):
            logits = w[0] @ layer_norm(x[t], w[-2], w[-1])
            total += math.log(sum(np.exp(logits))) - logits[targets[b, t]]
    return total / (case.B * case.T)


def self_test():
    failures = []

    def expect(what, error, bound):
        print("%-72s %.1e (bound %.0e)" % (what, error, bound))
        if not error <= bound:
            failures.append(what)

    case = Case(V=11, C=12, NH=3, L=2, B=2, T=5, context=7, steps=1)
    weights = [case.weight(t) for t in range(len(case.tensors))]
    params = initial_params(case)
    loss, gradients = loss_and_gradients(case, params, 0)
    tokens, targets = case.batch(0)
    numpy_loss = loss_in_numpy(case, weights, tokens, targets)
    expect("loss against the formulas in numpy, relative", abs(loss - numpy_loss) / numpy_loss, 1e-14)

    # Central differences with h: error of order h^2 times the third derivative, plus rounding of order 1e-16 / h.
    generator, h, worst = np.random.default_rng(1), 1e-5, 0.0
    for t, tensor in enumerate(weights):
        for i in generator.choice(tensor.size, min(tensor.size, 6), replace=False):
            both = []
            for delta in (h, -h):
                moved = [x.astype(np.float64) for x in weights]
                moved[t].flat[i] += delta
                both.append(loss_in_numpy(case, moved, tokens, targets))
            worst = max(worst, abs((both[0] - both[1]) / (2 * h) - gradients[t].flatten()[i].item()))
    expect("gradients against numerical ones, absolute (|gradient| = %.2f)"
           % math.sqrt(sum(g.square().sum().item() for g in gradients)), worst, 1e-9)

    # Clipping off, so that torch's optimizer sees the same gradients; two parameter groups, as decay is on matrices.
    case = Case(V=11, C=12, NH=3, L=2, B=2, T=5, grad_clip=1e30)
    ours, theirs = initial_params(case), initial_params(case)
    m, v = ([torch.zeros_like(p, requires_grad=False) for p in ours] for _ in range(2))
    lr, beta1, beta2, epsilon, decay = (float(np.float32(case.optimizer[name])) for name in list(DEFAULT_OPTIMIZER)[:5])
    groups = [{"params": [p for p, (_, _, kind) in zip(theirs, case.tensors) if (kind == "matrix") == matrix],
               "weight_decay": decay if matrix else 0.0} for matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=epsilon)
    for step in range(10):
        _, gradients = loss_and_gradients(case, ours, step)
        adamw_step(case, ours, m, v, gradients, 1.0, step + 1)
        for p, g in zip(theirs, gradients):
            p.grad = g
        optimizer.step()
    expect("ten steps of AdamW against torch.optim.AdamW, absolute",
           max((a - b).abs().max().item() for a, b in zip(ours, theirs)), 1e-12)

    # The estimate of a difference's norm from its projections, for a difference everywhere and one in a single element.
    # Its standard deviation is 9 %; the bound is four of them.
    case = Case(V=65, C=48, NH=3, L=1, B=1, T=1)
    difference = torch.from_numpy(generator.standard_normal((144, 48)))
    estimate = math.sqrt(np.mean(project(case, 2, difference)**2))
    expect("norm of a dense difference from its projections, relative",
           abs(estimate / difference.norm().item() - 1), 0.36)
    difference.zero_()[100, 7] = 0.25
    expect("norm of one element's difference, relative",
           abs(math.sqrt(np.mean(project(case, 2, difference)**2)) / 0.25 - 1), 1e-15)
    signs = np.array([project(case, 2, F.one_hot(torch.tensor(i), 100).double()) for i in range(100)])
    expect("signs of projections: mean over 6400", abs(signs.mean()), 4 / 80)

    for t, values in enumerate(weights):
        low_bits = values.view(np.uint32) & 0xFFFF
        if low_bits.any():
            failures.append("tensor %d is not exact in bf16" % t)
    print("self-test: %s" % ("FAILED: " + "; ".join(failures) if failures else "passed"))
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="DIR", help="write the golden file of every case")
    what.add_argument("--check", metavar="DIR", help="compare the golden files with what is computed now")
    what.add_argument("--case", metavar="V,C,NH,L,B,T,CONTEXT", help="one golden file for this shape")
    what.add_argument("--self-test", action="store_true", help="check this reference itself")
    parser.add_argument("--out", metavar="FILE", help="with --case: where to write it")
    parser.add_argument("--steps", type=int, default=10, help="with --case: AdamW steps")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="with --case")
    parser.add_argument("--seed", type=int, default=1337, help="with --case")
    arguments = parser.parse_args()

    if arguments.self_test:
        return self_test()
    if arguments.case:
        try:
            V, C, NH, L, B, T, context = (int(x) for x in arguments.case.split(","))
            case = Case(V, C, NH, L, B, T, context, arguments.steps, arguments.seed,
                        learning_rate=arguments.learning_rate)
        except ValueError as error:
            parser.error("--case %s: %s" % (arguments.case, error))
        text = to_text(golden(case))
        if arguments.out:
            with open(arguments.out, "w") as file:
                file.write(text)
        else:
            sys.stdout.write(text)
        return 0

    wrong = 0
    if arguments.write:
        os.makedirs(arguments.write, exist_ok=True)
    for name, settings in CASES.items():
        record = golden(Case(**settings))
        path = os.path.join(arguments.write or arguments.check, name + ".json")
        if arguments.write:
            with open(path, "w") as file:
                file.write(to_text(record))
            print("%s: loss %.6f -> %.6f, gradient norm %.3f" % (path, record["steps"][0]["loss"],
                                                                 record["steps"][-1]["loss"],
                                                                 record["steps"][0]["gradient_norm"]))
            continue
        try:
            with open(path) as file:
                found = differences(record, json.load(file))
        except (OSError, ValueError, KeyError) as error:
            found = ["%s: %s" % (type(error).__name__, error)]
        print("%s: %s" % (path, "; ".join(found) if found else "as computed"))
        wrong += bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
