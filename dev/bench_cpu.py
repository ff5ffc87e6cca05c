#!/usr/bin/env python3
"""What dev/bench.sh runs: this program and PyTorch in turn on this machine's cores, and the limit of both.

A round times, for one setting and precision, a few steps of the program, of PyTorch, and of the matrix products alone
(bench_rates.c). Figures are medians over rounds, of the rounds' own ratios where they are ratios, so that a machine
whose speed drifts does not spoil the comparison. The limit is the time that a step's matrix products take alone, plus
attention's operations at the same rate, plus AdamW's bytes at the measured bandwidth; nothing else.
"""
import argparse
import datetime
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/cpu"
CORES = len(os.sched_getaffinity(0))
STORE = BUILD / "bench.json"  # what has been measured since the last `make clean`: a long --write can go on
MARKS = ("<!-- dev/bench.sh --write: begin -->", "<!-- dev/bench.sh --write: end -->")

# steps: of a round, of the program and of PyTorch alike. apart: PyTorch's memory leaves no room for the program beside it
# on a machine of 24 GB, so it is started anew in each round.
GPT2 = {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50257, "batch": 4}
SETTINGS = {
    "gpt2-t64": {"title": "GPT-2 124M, B 4, T 64", **GPT2, "length": 64, "steps": 6},
    "gpt2-t256": {"title": "GPT-2 124M, B 4, T 256", **GPT2, "length": 256, "steps": 3},
    "gpt2-t1024": {"title": "GPT-2 124M, B 4, T 1024", **GPT2, "length": 1024, "steps": 1, "apart": True},
    "small": {"title": "6 layers, 384 wide, bytes, B 8, T 256", "layers": 6, "heads": 6, "width": 384,
              "vocabulary": 256, "batch": 8, "length": 256, "steps": 10},
}
WARM_UP = 2

# The C library keeps freed memory, on huge pages: fresh pages cost PyTorch up to two thirds of its speed.
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "60000000000", "MALLOC_TOP_PAD_": "268435456",
         "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def padded(vocabulary):
    return (vocabulary + 127) // 128 * 128


def parameters(s):
    return (padded(s["vocabulary"]) + s["length"]) * s["width"] + s["layers"] * 12 * s["width"] ** 2


def write_tokens(path, vocabulary):
    draw, count = random.Random(1), 200000
    tokens = struct.pack(f"<{count}H", *(draw.randrange(vocabulary) for _ in range(count)))
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + tokens)


def program(s, precision, work, steps, binary=ROOT / "train_gpt", nproc=1, env=None):
    """Runs the program for `steps` steps after WARM_UP; returns their milliseconds, and peak resident bytes."""
    data, log = work / f"{s['vocabulary']}.bin", work / "log"
    if not data.exists():
        write_tokens(data, s["vocabulary"])
    command = [binary, "--train-data", data, "--precision", precision, "--steps", WARM_UP + steps, "--log-dir", log,
               "--n-layer", s["layers"], "--n-head", s["heads"], "--n-embd", s["width"],
               "--vocab-size", s["vocabulary"], "--context-length", s["length"],
               "--micro-batch", s["batch"] // nproc, "--nproc", nproc]
    process = subprocess.Popen([str(word) for word in command], env={**os.environ, **(env or {})},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{output}{errors}")
    peak = usage.ru_maxrss * 1024
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    times = [line["step_ms"] for line in lines if line.get("step_ms") is not None]
    return times[-steps:], peak


class Torch:
    """A PyTorch process that runs steps when asked."""

    def __init__(self, s, precision):
        env = {**os.environ, **TUNED}
        env.pop("OPENBLAS_CORETYPE", None)  # may force slow kernels
        run = {**s, "precision": precision, "threads": CORES}
        self.process = subprocess.Popen(["/usr/bin/python3", ROOT / "dev/bench_torch_cpu.py", json.dumps(run)],
                                        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.run(WARM_UP)

    def run(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("dev/bench_torch_cpu.py ended")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def rates(s, precision):
    command = [BUILD / "bench_rates", precision, s["batch"] * s["length"], s["width"], s["layers"],
               padded(s["vocabulary"])]
    return json.loads(subprocess.check_output([str(word) for word in command], text=True))


def limit_ms(s, precision, rate):
    attention = 7 * s["layers"] * s["batch"] * s["width"] * s["length"] * (s["length"] + 1)
    # fp32: gradient, and parameter, two moments read and written; bf16: two bytes of gradient and parameter, and master
    adamw = 28 * parameters(s)
    return rate["linear_ms"] + 1e3 * attention / rate["rate"] + 1e3 * adamw / rate["bandwidth"]


def compare(s, precision, rounds, work):
    tokens = s["batch"] * s["length"]
    torch = None if s.get("apart") else Torch(s, precision)
    lines = []
    for _ in range(rounds):
        times, memory = program(s, precision, work, s["steps"])
        process = torch or Torch(s, precision)
        other = process.run(s["steps"])
        if torch is None:
            process.close()
        ours, theirs = statistics.median(times), statistics.median(other["ms"])
        limit = limit_ms(s, precision, rates(s, precision))
        lines.append({"ours": 1e3 * tokens / ours, "torch": 1e3 * tokens / theirs, "limit": 1e3 * tokens / limit,
                      "ratio": theirs / ours, "of_limit": limit / ours, "memory": memory,
                      "torch_memory": other["memory"]})
    if torch is not None:
        torch.close()
    result = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
    result.update(title=s["title"], precision=precision, torch_version=other["version"], rounds=rounds,
                  low=min(line["ratio"] for line in lines), high=max(line["ratio"] for line in lines))
    return result


def profile(s, precision, work):
    """Prints each operation's share of a step, and its floor: its bytes over bandwidth or its operations over rate."""
    path = work / "op_times.json"
    rate = rates(s, precision)
    program(s, precision, work, s["steps"] + 3, BUILD / "op_times/train_gpt", env={"TRAIN_GPT_OP_TIMES": str(path)})
    head, *entries = [json.loads(line) for line in path.read_text().splitlines()]
    rest = head["step_ms"] - sum(entry["ms"] for entry in entries)
    print(f"\n{s['title']}, {precision}: {head['step_ms']:.1f} ms a step, {head['faults']:.0f} page faults; "
          f"{rate['rate'] / 1e9:.0f} GFLOP/s, {rate['bandwidth'] / 1e9:.0f} GB/s measured alone")
    print(f"{'operation':44s} {'calls':>5s} {'ms':>9s} {'share':>6s} {'floor ms':>9s} {'of floor':>8s}")
    for entry in sorted(entries, key=lambda entry: -entry["ms"]):
        floor = 1e3 * max(entry["bytes"] / rate["bandwidth"], entry["operations"] / rate["rate"])
        share = 100 * entry["ms"] / head["step_ms"]
        print(f"{entry['name']:44s} {entry['calls']:5d} {entry['ms']:9.2f} {share:5.1f} % {floor:8.2f} "
              f"{entry['ms'] / floor:8.2f}")
    print(f"{'everything else':44s} {'':5s} {rest:9.2f} {100 * rest / head['step_ms']:5.1f} %")


def ranks(rounds, work):
    """Two ranks of one thread against one rank of two, on the same global batch; and the all-reduce of 64 MB."""
    s, lines, reduce = SETTINGS["gpt2-t256"], [], []
    for _ in range(rounds):
        one, _ = program(s, "bf16", work, s["steps"], env={"OMP_NUM_THREADS": "2"})
        two, _ = program(s, "bf16", work, s["steps"], nproc=2, env={"OMP_NUM_THREADS": "1"})
        lines.append(statistics.median(one) / statistics.median(two))
        for _ in range(3):  # beside each other: bandwidth drifts, too
            bandwidth = json.loads(subprocess.check_output([BUILD / "bench_rates", "bandwidth"], text=True))["bandwidth"]
            text = subprocess.run([BUILD / "bench_comm", "--nproc", "2", "--megabytes", "64"], check=True,
                                  capture_output=True, text=True).stdout
            seconds = 64e6 / (float(text.split("all_reduce ")[1].split()[0]) * 1e9)
            floor = 3 * 64e6 / bandwidth  # both inputs read, the sum written
            reduce.append((seconds * 1e3, seconds / floor))
    result = {"ranks": statistics.median(lines), "reduce_ms": statistics.median(r[0] for r in reduce),
              "reduce_of_floor": statistics.median(r[1] for r in reduce)}
    stored = remember("ranks", result)
    print(f"\nTwo ranks of one thread: {result['ranks']:.2f} of the speed of one rank of two threads (GPT-2 124M, "
          f"B 4, T 256, bf16, ddp)")
    print(f"All-reduce of 64 MB in bf16 over two ranks: {result['reduce_ms']:.1f} ms, "
          f"{result['reduce_of_floor']:.2f} of the time that summing takes at the measured bandwidth")
    return stored


def plot(results):
    """Bars of tokens/s beside the limit's, as an SVG image."""
    left, bar, gap, width = 290, 14, 16, 420
    rows, y = [], 40
    for result in results:
        most = result["limit"]
        rows.append(f'<text x="{left - 8}" y="{y + 1.6 * bar:.0f}" text-anchor="end">{result["title"]}, '
                    f'{result["precision"]}</text>')
        for name, color in (("ours", "#2a6fb0"), ("torch", "#c0792a"), ("limit", "#bbbbbb")):
            rows.append(f'<rect x="{left}" y="{y}" width="{width * result[name] / most:.1f}" height="{bar - 2}" '
                        f'fill="{color}"/><text x="{left + width * result[name] / most + 4:.1f}" y="{y + bar - 4}">'
                        f'{result[name]:.0f}</text>')
            y += bar
        y += gap
    legend = "".join(f'<rect x="{left + 130 * i}" y="12" width="12" height="12" fill="{color}"/>'
                     f'<text x="{left + 130 * i + 18}" y="22">{name}</text>'
                     for i, (name, color) in enumerate((("this program", "#2a6fb0"), ("PyTorch, tuned", "#c0792a"),
                                                        ("limit", "#bbbbbb"))))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{y}" '
            f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{legend}'
            f'{"".join(rows)}</svg>\n')


def remember(key, result):
    """Stores a result with its date; returns all that are stored."""
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    stored[key] = {**result, "date": f"{datetime.date.today():%Y-%m-%d}"}
    STORE.write_text(json.dumps(stored, indent=1))
    return stored


def table(results):
    lines = ["| | precision | tokens/s | PyTorch | ratio | limit | of the limit | memory | PyTorch's | date, rounds |",
             "|---|---|---:|---:|---:|---:|---:|---:|---:|---|"]
    for r in results:
        lines.append(f"| {r['title']} | {r['precision']} | {r['ours']:.0f} | {r['torch']:.0f} | {r['ratio']:.2f} | "
                     f"{r['limit']:.0f} | {r['of_limit']:.2f} | {r['memory'] / 1e9:.2f} GB | "
                     f"{r['torch_memory'] / 1e9:.2f} GB | {r['date']}, {r['rounds']} |")
    return "\n".join(lines)


def processor():
    with open("/proc/cpuinfo") as info:
        return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "CPU")


def write(stored):
    results = [stored[f"{name} {precision}"] for name in SETTINGS for precision in ("fp32", "bf16")
               if f"{name} {precision}" in stored]
    two = stored["ranks"]
    (ROOT / "dev/bench.svg").write_text(plot(results))
    readme = ROOT / "README.md"
    text = readme.read_text()
    if any(text.count(mark) != 1 for mark in MARKS):
        raise SystemExit(f"README.md needs these two lines, once each:\n{MARKS[0]}\n{MARKS[1]}")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    section = (f"{MARKS[0]}\n{processor()}, {CORES} cores, PyTorch {results[0]['torch_version']}; medians of rounds in turn "
               f"(`bash dev/bench.sh`).\n\n"
               f"{table(results)}\n\n![tokens per second](dev/bench.svg)\n\n"
               f"Two ranks of one thread reach {two['ranks']:.2f} of the speed of one rank of two threads (GPT-2 124M, "
               f"B 4, T 256, bf16, ddp). All-reduce of 64 MB in bf16 over two ranks takes {two['reduce_ms']:.1f} ms, "
               f"{two['reduce_of_floor']:.2f} of the time that the sum takes at the measured bandwidth.\n{MARKS[1]}")
    readme.write_text(before + section + after)


def main():
    parser = argparse.ArgumentParser(prog="bash dev/bench.sh")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)}; default: all")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, against each floor")
    parser.add_argument("--ranks", action="store_true", help="two ranks against one, and the time of an all-reduce")
    parser.add_argument("--write", action="store_true", help="all of it, into README.md; with settings these, beside what has been measured before")
    arguments = parser.parse_args()
    if any(name not in SETTINGS for name in arguments.settings):
        parser.error(f"settings are {', '.join(SETTINGS)}")
    names = arguments.settings or list(SETTINGS)
    precisions = [arguments.precision] if arguments.precision else ["fp32", "bf16"]
    runs = [(name, precision) for name in names for precision in precisions]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        if arguments.profile:
            for name, precision in runs:
                profile(SETTINGS[name], precision, work)
            return
        if arguments.ranks:
            ranks(arguments.rounds, work)
            return
        for name, precision in runs:
            r = compare(SETTINGS[name], precision, arguments.rounds, work)
            stored = remember(f"{name} {precision}", r)
            print(f"{r['title']:38s} {precision}  {r['ours']:7.0f} tokens/s, PyTorch {r['torch']:7.0f}: "
                  f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f}); limit {r['limit']:7.0f}: "
                  f"{r['of_limit']:.2f}; {r['memory'] / 1e9:.2f} GB, "
                  f"PyTorch {r['torch_memory'] / 1e9:.2f} GB", flush=True)
        if arguments.write:
            write(stored if "ranks" in stored and arguments.settings else ranks(arguments.rounds, work))


if __name__ == "__main__":
    main()
