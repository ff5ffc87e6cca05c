#!/usr/bin/env python3
"""What a run must take and send, from the formulas of the strategies alone: the reference for configs/.

    python3 dev/expected.py configs/*.json            compares each file's published.cases; exit status 1: some differ
    python3 dev/expected.py --write configs/*.json    writes them

This is a second derivation, on purpose: it shares nothing with the program (layout.h, zero.h, plan.h), so that a slip
in either shows as a difference. Sizes are in elements where they are not called bytes. Only the standard library is
used.
"""
import json
import pathlib
import sys

# n_layer, n_head, n_embd, context_length; 50257 tokens. GPT-2: Radford et al. 2019; GPT-3: Brown et al. 2020, Table 2.1
# (13B with 40 heads of 128 = 5120 wide: the printed 5140 does not divide).
PRESETS = {"gpt2-124M": (12, 12, 768, 1024), "gpt2-1558M": (48, 25, 1600, 1024), "gpt3-6.7B": (32, 32, 4096, 2048),
           "gpt3-13B": (40, 40, 5120, 2048), "gpt3-175B": (96, 96, 12288, 2048)}

# What a strategy cuts into one shard per rank: parameters, gradients, optimizer state.
SHARDED = {"ddp": (False, False, False), "zero1": (False, False, True), "zero2": (False, True, True),
           "zero3": (True, True, True)}

ALIGN = 64  # elements at which tensors start


def up(n, multiple):
    return -(-n // multiple) * multiple


class Run:
    """The options of a configuration that sizes depend on, flags first, and what follows from them."""

    def __init__(self, config, flags, ranks):
        options = {}
        for section, keys in config.items():
            if section != "published":
                options.update(keys)
        options.update(flags)
        get = options.get
        if get("preset"):
            shape = dict(zip(("n_layer", "n_head", "n_embd", "context_length"), PRESETS[options["preset"]]),
                         vocab_size=50257)
        else:
            shape = {}
        for key in ("n_layer", "n_head", "n_embd", "context_length", "vocab_size"):
            setattr(self, key, options[key] if key in options else shape[key])
        self.ranks = ranks
        self.shard_group = get("shard_group", 0) or ranks
        self.rows = get("micro_batch") * (get("sequence_length", 0) or self.context_length)
        pass_tokens = self.rows * ranks
        self.micro_batches, rest = divmod(get("tokens_per_step", 0) or pass_tokens, pass_tokens)
        assert rest == 0 and self.micro_batches > 0, "micro-batches must be whole"
        bf16 = get("precision", "bf16") == "bf16"
        self.param_bytes = 2 if bf16 else 4
        self.grad_bytes = 4 if not bf16 or get("gradient_dtype", "auto") == "fp32" else 2
        self.optimizer_bytes = 8 + (4 if bf16 and get("master_weights", True) else 0)  # moments, masters
        self.prefetch = get("prefetch", 1)
        self.keep = not get("reshard_after_forward", True)
        self.recompute = get("recompute", "none") == "full"
        self.chunks = get("classifier_chunks", 1)
        self.dropout = get("dropout", 0)
        self.padded_vocab = up(self.vocab_size, 128)


def parameters(run):
    """V C + T C + L (12 C^2 + 13 C) + 2 C."""
    C = run.n_embd
    return (run.vocab_size + run.context_length) * C + run.n_layer * (12 * C * C + 13 * C) + 2 * C


def units(run):
    """Padded sizes, in order: wte, wpe, the blocks, the final layer norm. Every tensor starts on 64 elements, every
    unit is a multiple of 64 per rank."""
    C = run.n_embd
    block = [3 * C * C, C * C, 4 * C * C, 4 * C * C]  # query/key/value, projection, MLP in and out
    block += [C, C, 3 * C, C, C, C, 4 * C, C]  # layer norm 1, biases of attention, layer norm 2, biases of the MLP
    tensors = [[run.padded_vocab * C], [run.context_length * C]] + run.n_layer * [block] + [[C, C]]
    return [up(sum(up(size, ALIGN) for size in unit), ALIGN * run.ranks) for unit in tensors]


def activation_bytes(run):
    """What a GPT-2 step keeps: inputs of the blocks; per block the layer norms' outputs and statistics, q/k/v,
    attention's output and log-sum-exp, the middle residual, and both sides of GELU: 15 C a token; then the
    head, and the gradients that flow. Each buffer starts on 256 bytes."""
    rows, C, x = run.rows, run.n_embd, run.param_bytes
    n = rows * C * x
    block = [n, 3 * n, n, n, n, 4 * n, 4 * n] + 4 * [4 * rows] + [4 * rows * run.n_head]
    head = [n, 4 * rows, 4 * rows, -(-rows // run.chunks) * run.padded_vocab * x, 4 * rows, 8]
    flowing = [n, n, 4 * n] + ([n] if run.dropout else [])
    tokens = [4 * rows, 4 * rows]
    blocks = (1 if run.recompute else run.n_layer) * block
    return sum(up(size, 256) for size in tokens + [(run.n_layer + 1) * n] + blocks + head + flowing)


def reads(run):
    """The units whose parameters a step reads, in order: (unit, read again by a later use of the micro-batch). The
    embeddings' own backward reads none."""
    L = run.n_layer
    final, blocks = L + 2, list(range(2, L + 2))
    forward = [(0, True), (1, False)] + [(unit, True) for unit in blocks] + [(final, True)]
    return (forward + [(0, False), (final, False)] + [(unit, False) for unit in reversed(blocks)]) * run.micro_batches


def gathers(run):
    """zero3: the units that are gathered, one entry for each time. A unit stays only if its next use lies within the
    prefetched ones, or, if so asked, until its backward. wte is let go together with wpe, the use after it."""
    uses = reads(run)
    gathered = []
    stays = set()
    for i, (unit, again) in enumerate(uses):
        if unit not in stays:
            gathered.append(unit)
        let_go = i + 1 if unit == 0 and again else i
        ahead = [later for later, _ in uses[let_go + 1:let_go + 1 + run.prefetch]]
        stays.discard(unit)
        if unit in ahead or (again and run.keep):
            stays.add(unit)
    return gathered


def memory(run, strategy):
    """Bytes a rank, by component. Not the device's workspace, which depends on the device and its threads."""
    sizes = units(run)
    total, group = sum(sizes), run.shard_group
    params, grads, optimizer = (group if cut else 1 for cut in SHARDED[strategy])
    result = {"parameters": total // params * run.param_bytes, "gradients": total // grads * run.grad_bytes,
              "optimizer": total // optimizer * run.optimizer_bytes}
    result["model_state"] = sum(result.values())
    result["activations"] = activation_bytes(run)
    # Where state is sharded, full-size buffers: wte's own, and those of other units in turn, as large as the largest.
    wte, others = sizes[0], sizes[1:]
    communication = max(64 * (run.ranks + 1), 1024)  # scalars: 64 bytes of each rank and one's own, room for an error
    if SHARDED[strategy][0]:
        ahead = len(sizes) if run.keep else run.prefetch + 1
        communication += (wte + min(ahead, len(others)) * max(others)) * run.param_bytes
    if SHARDED[strategy][1]:
        communication += (wte + min(2, len(others)) * max(others)) * run.grad_bytes
    result["communication"] = communication
    result["peak_less_workspace"] = result["model_state"] + result["activations"] + communication
    return result


def communication(run, strategy):
    """Collectives of a step: calls, bytes of the full buffers, and bytes that a rank sends under a ring. What is not
    named does not occur."""
    sizes = units(run)
    params_cut, grads_cut, optimizer_cut = SHARDED[strategy]
    ranks, group = run.ranks, run.shard_group
    result = {}

    def add(kind, payloads, n):
        if payloads:
            result[kind] = {"calls": len(payloads), "payload_bytes": sum(payloads),
                            "bus_bytes": sum(payload // n * (n - 1) for payload in payloads) *
                            (2 if kind == "all_reduce" else 1)}

    gradients = [size * run.grad_bytes for size in sizes]
    if not optimizer_cut:
        add("all_reduce", gradients if ranks > 1 else [], ranks)
    else:
        across = ranks // group  # groups that hold the same shards: once a step
        add("all_reduce", [size // group for size in gradients] if across > 1 else [], across)
        add("reduce_scatter", gradients * (run.micro_batches if grads_cut else 1), group)
        gathered = gathers(run) if params_cut else range(len(sizes))
        add("all_gather", [sizes[unit] * run.param_bytes for unit in gathered], group)
    add("scalars", [3 * 8 * ranks], ranks)  # loss, norm, stop: a double each
    return result


def expected(config, case):
    """The `expected` part of a case: memory and communication of every strategy that it names."""
    run = Run(config, case.get("flags", {}), case["world_size"])
    return {strategy: {"memory_bytes": memory(run, strategy), "communication_per_step": communication(run, strategy)}
            for strategy in case["expected"]}


def differences(config):
    """What published.cases says otherwise than the formulas: (where, published, by formula)."""
    found = []

    def compare(where, published, formula):
        if isinstance(published, dict) and isinstance(formula, dict):
            for key in {**published, **formula}:
                compare(f"{where}.{key}", published.get(key), formula.get(key))
        elif published != formula:
            found.append((where, published, formula))

    for number, case in enumerate(config.get("published", {}).get("cases", [])):
        compare(f"published.cases[{number}].expected", case["expected"], expected(config, case))
    return found


def text(value, indent=0, taken=0):
    """JSON in lines: what fits on a line of 120, `taken` of it in use, stands on one."""
    line = json.dumps(value, ensure_ascii=False)
    if indent > 0 and len(line) + indent + taken < 120 or not isinstance(value, (dict, list)) or not value:
        return line
    inner = indent + 2
    if isinstance(value, dict):
        names = [json.dumps(key) + ": " for key in value]
        items = [name + text(item, inner, len(name)) for name, item in zip(names, value.values())]
    else:
        items = [text(item, inner) for item in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + "\n" + ",\n".join(" " * inner + item for item in items) + "\n" + " " * indent + ends[1]


def main(arguments):
    write = arguments[:1] == ["--write"]
    status = 0
    for name in arguments[1:] if write else arguments:
        path = pathlib.Path(name)
        config = json.loads(path.read_text())
        if not config.get("published", {}).get("cases"):
            continue
        if write:
            for case in config["published"]["cases"]:
                case["expected"] = expected(config, case)
            path.write_text(text(config) + "\n")
        for where, published, formula in differences(config):
            print(f"{name}: {where}: {published}, by formula {formula}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
