#!/usr/bin/env python3
"""The work of reproduce.sh and ladder.sh: plans and runs configurations, lays the outcome beside what they publish.

    reproduce.py reproduce [--plan-only] [--steps N] [CONFIG...]
    reproduce.py ladder    [--steps N] [CONFIG]

configs/README.md says what `published` holds. Only the standard library is used.
"""
import argparse
import array
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNITS = {"parameters": 1, "1e9 parameters": 1e9, "bytes": 1, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
STATE = ("parameters", "gradients", "optimizer")
COMPONENTS = STATE + ("model_state", "activations", "communication", "peak_less_workspace")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "send", "recv", "scalars")


class Failure(Exception):
    """A plan or a run that did not end well."""


def flags(options):
    return [f"--{key.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in options.items()]


def program(arguments):
    process = subprocess.run([str(ROOT / "train_gpt"), *map(str, arguments)], stdin=subprocess.DEVNULL,
                             capture_output=True, text=True, errors="replace")
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise Failure(f"train_gpt {' '.join(map(str, arguments))}: exit code {process.returncode}: {lines[-1]}")


def plan(config, options, ranks, work):
    """The plan of every strategy, as --plan-json writes it."""
    program([config, "--plan", "--world-size", ranks, "--plan-json", work / "plan.json", *flags(options)])
    return json.loads((work / "plan.json").read_text())


def counted(source):
    """Bytes and collectives of a plan's strategy or of a summary, by the names that `published` uses. The workspace is
    left out: it depends on the device and its threads."""
    memory = dict(source["memory_bytes"])
    memory["model_state"] = sum(memory[name] for name in STATE)
    memory["peak_less_workspace"] = memory["peak"] - memory["workspace"]
    return {"memory_bytes": memory, "communication_per_step": source["communication_per_step"]}


# ---------------------------------------------------------------------------------------------------------------------
# This machine, and data to run on


def cpu():
    """The name of this machine's CPU and the cores that are free to use."""
    name = platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def available_bytes():
    """Memory that can be had: the machine's, or what a container's limit leaves of it."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    try:
        limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(pathlib.Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available


def gpus():
    """Name and free bytes of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        return [(name, int(free) * 2**20) for name, free in (line.rsplit(", ", 1) for line in lines)]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return []


def machine(device):
    found = gpus() if device == "cuda" else []
    return f"{len(found)} {found[0][0]}" if found else cpu()


def obstacle(device, peak, ranks):
    """Why ranks that take `peak` bytes of device memory each cannot run here; None if they can. On a CPU ranks share
    the machine's memory, and take a tenth more and 200 MB each for the program, its libraries and buffers that they
    share; on GPUs each has one, and CUDA, cuBLASLt and NCCL take about a gigabyte of it."""
    if device == "cuda":
        free = [free for _, free in gpus()]
        need = peak * 1.02 + 1e9
        if len(free) < ranks:
            return f"{ranks} ranks take a GPU each, {len(free)} answer"
        if min(free[:ranks]) < need:
            return f"a rank takes {need / 1e9:.1f} GB, {min(free[:ranks]) / 1e9:.1f} GB of a GPU are free"
        return None
    need, have = ranks * (peak * 1.1 + 200e6), available_bytes()
    return f"{ranks} ranks take {need / 1e9:.1f} GB, {have / 1e9:.1f} GB are free" if need > have else None


def english(work):
    """A text and its validation part: the quickstart's, made from the installed Bible, or made up."""
    for folder in (ROOT / "data/english", work / "text"):
        if (folder / "train.txt").is_file() and (folder / "val.txt").is_file():
            return folder
    made = subprocess.run(["bash", str(ROOT / "dev/data/english_text.sh"), str(folder)], capture_output=True)
    if made.returncode != 0:
        draw = random.Random(7)
        words = ["".join(draw.choice("aeiou") + draw.choice("bdklmnrst") for _ in range(draw.randint(1, 4)))
                 for _ in range(500)]
        weights = [1 / (rank + 1) for rank in range(len(words))]
        folder.mkdir(exist_ok=True)
        for name, sentences in (("train.txt", 20000), ("val.txt", 1000)):
            lines = (" ".join(draw.choices(words, weights, k=draw.randint(4, 12))) for _ in range(sentences))
            (folder / name).write_text(".\n".join(lines) + ".\n")
    return folder


def token_shard(work, vocabulary, count=1 << 20):
    """Random 16-bit tokens in a shard, as llm.c writes them: bytes and collectives do not depend on the text."""
    path = work / f"tokens_{vocabulary}.bin"
    if not path.exists():
        tokens = array.array("H", random.Random(7).choices(range(vocabulary), k=count))
        path.write_bytes(array.array("i", [20240520, 1, count] + [0] * 253).tobytes() + tokens.tobytes())
    return path


def data(config, work):
    """The options that name data to run on: a text for models of bytes, tokens for the others."""
    model = json.loads(pathlib.Path(config).read_text())["model"]
    if model.get("vocab_size") == 256:
        folder = english(work)
        return {"train_data": folder / "train.txt", "val_data": folder / "val.txt"}
    return {"train_data": token_shard(work, model.get("vocab_size", 50257)), "val_data": ""}


def run(config, options, ranks, steps, work):
    """Runs a configuration for some steps; returns its summary."""
    options = {"val_every": 0, "sample_every": 0, **data(config, work), **options, "steps": steps,
               "nproc": ranks, "log_dir": work / "log"}
    (work / "log" / "summary.json").unlink(missing_ok=True)
    program([config, *flags(options)])
    return json.loads((work / "log" / "summary.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# reproduce


def differences(where, expected, got):
    """Every figure that is not as expected. A collective that is not named must not occur."""
    found = []
    for name, value in expected["memory_bytes"].items():
        if got["memory_bytes"].get(name) != value:
            found.append(f"{where}: memory_bytes.{name}: expected {value} bytes, got {got['memory_bytes'].get(name)}")
    nothing = {"calls": 0, "payload_bytes": 0, "bus_bytes": 0}
    for kind in KINDS:
        for name, value in expected["communication_per_step"].get(kind, nothing).items():
            count = got["communication_per_step"][kind][name]
            if count != value:
                found.append(f"{where}: communication_per_step.{kind}.{name}: expected {value}, got {count}")
    return found


def memory_line(name, what, memory):
    print(f"  {name:6s} {what:9s}" + "".join(f" {memory[component] / 1e6:14.3f}" for component in COMPONENTS))


def communication_line(name, what, kinds, all_kinds):
    cells = ""
    for kind in KINDS:
        if kind in all_kinds:
            count = kinds.get(kind, {"calls": 0, "bus_bytes": 0})
            cells += f" {count['calls']:5d} {count['bus_bytes'] / 1e6:13.6f}"
    print(f"  {name:6s} {what:9s}" + cells)


def print_case(expected, results):
    """results: strategy -> (what, counted) lines, planned first, then measured where it was."""
    titles = ("parameters", "gradients", "optimizer", "model state", "activations", "communication", "peak*")
    print("\n  memory, MB a rank" + "".join(f"{title:>15s}" for title in titles)[1:])
    for strategy, lines in results.items():
        memory_line(strategy, "expected", expected[strategy]["memory_bytes"])
        for what, got in lines:
            memory_line("", what, got["memory_bytes"])
    kinds = [kind for kind in KINDS if any(kind in one["communication_per_step"] for one in expected.values())]
    print("\n  calls, MB sent by" + "".join(f"{kind:>20s}" for kind in kinds)[1:] + "\n  a rank in a step")
    for strategy, lines in results.items():
        communication_line(strategy, "expected", expected[strategy]["communication_per_step"], kinds)
        for what, got in lines:
            communication_line("", what, got["communication_per_step"], kinds)


def case_name(config, case):
    words = [f"{config}: {case['world_size']} {'ranks' if case['world_size'] > 1 else 'rank'}"]
    return ", ".join(words + [f"{key} {str(value).lower()}" for key, value in case.get("flags", {}).items()])


def reproduce_case(config, case, arguments, work):
    """Plans, and runs where that is asked for and fits; prints; returns the differences, and by strategy what was
    planned and measured."""
    name, ranks, problems, notes, results, rates = case_name(config, case), case["world_size"], [], [], {}, {}
    device, steps = None, None
    for strategy, expected in case["expected"].items():
        where = f"{name}, {strategy}"
        options = {**case.get("flags", {}), "strategy": strategy}
        try:
            everything = plan(config, options, ranks, work)
            planned, device = everything[strategy], everything["device"]
            results[strategy] = [("planned", counted(planned))]
            problems += differences(f"{where}, planned", expected, results[strategy][0][1])
            asked = case.get("run") or (case.get("gpu_run") if device == "cuda" else None)
            if not asked or arguments.plan_only:
                continue
            reason = obstacle(device, planned["memory_bytes"]["peak"], ranks)
            if reason:
                notes.append(f"{strategy}: not run: {reason}")
                continue
            steps = arguments.steps or asked["steps"]
            summary = run(config, options, ranks, steps, work)
            results[strategy].append(("measured", counted(summary)))
            problems += differences(f"{where}, measured", expected, results[strategy][1][1])
            rates[strategy] = summary["tokens_per_second"]
        except Failure as failure:
            problems.append(f"{where}: {failure}")
    ran = f"{steps} steps" if rates else "planned only"
    print(f"\n{name}: {ran}")
    print_case(case["expected"], results)
    for note in notes:
        print(f"  {note}")
    for strategy, rate in rates.items():
        print(f"  {strategy}: {rate:.0f} tokens/s on this machine ({machine(device)})")
    for published in case.get("throughput", []):
        rate = rates.get(published["strategy"])
        ratio = f"this machine: {rate / published['tokens_per_second']:.3g} of it" if rate else "not run here"
        print(f"  {published['strategy']}: {published['tokens_per_second']} tokens/s published, {published['machine']} "
              f"({published['source']}); {ratio}")
    return problems, results


def reproduce_figures(config, figures, work):
    """Figures that others have published, beside the plan's."""
    problems = []
    print(f"\n{config}: figures that others have published")
    print(f"  {'what':32s} {'ranks':>5s} {'published':>14s} {'tolerance':>10s} {'planned':>16s}  unit")
    for figure in figures:
        got = plan(config, figure.get("flags", {}), figure["world_size"], work)
        for key in figure["what"].split("."):
            got = got[key]
        got /= UNITS[figure["unit"]]
        tolerance = figure["tolerance"]
        good = tolerance is None or abs(got - figure["value"]) <= tolerance
        print(f"  {figure['what']:32s} {figure['world_size']:5d} {figure['value']:14.10g} "
              f"{'not judged' if tolerance is None else f'{tolerance:g}':>10s} {got:16.10g}  {figure['unit']}"
              f"{'' if good else '  DIFFERS'}\n      {figure['source']}: {figure['note']}")
        if not good:
            problems.append(f"{config}: {figure['what']} on {figure['world_size']} ranks: {figure['source']} has "
                            f"{figure['value']} {figure['unit']}, tolerance {tolerance}; planned {got:.10g}")
    return problems


def reproduce(arguments):
    configs = arguments.configs or sorted(os.path.relpath(path) for path in (ROOT / "configs").glob("*.json"))
    problems, lines = [], []
    for config in configs:
        published = json.loads(pathlib.Path(config).read_text()).get("published", {})
        if not published.get("cases"):
            if arguments.configs:
                problems.append(f"{config}: has no published.cases to reproduce")
            continue
        about = published.get("about", [])
        print("\n" + "\n".join([f"== {config}"] + ([about] if isinstance(about, str) else about)))
        with tempfile.TemporaryDirectory() as work:
            if published.get("figures"):
                problems += reproduce_figures(config, published["figures"], pathlib.Path(work))
            for case in published["cases"]:
                found, results = reproduce_case(config, case, arguments, pathlib.Path(work))
                problems += found
                lines += results.values()
                sys.stdout.flush()
    print("\n* peak without the device's workspace, which depends on the device and its threads.")
    for problem in problems:
        print(f"NOT REPRODUCED: {problem}")
    ran = sum(len(one) > 1 for one in lines)
    print(f"{ran} strategies run, {len(lines) - ran} only planned: " +
          (f"{len(problems)} differences" if problems else "every byte and every collective is as published"))
    return 1 if problems else 0


# ---------------------------------------------------------------------------------------------------------------------
# ladder


def volume(source, ranks, group, size_bytes):
    """What a step sends, in units of the parameters and without the ring's (N-1)/N: among the ranks that shard
    together, and across their groups."""
    bus = {kind: source["communication_per_step"][kind]["bus_bytes"] for kind in KINDS}
    if group == ranks:
        return sum(bus[kind] for kind in KINDS if kind != "scalars") * ranks / (ranks - 1) / size_bytes, 0.0
    inside = (bus["reduce_scatter"] + bus["all_gather"]) * (group / (group - 1) if group > 1 else 0)
    across = bus["all_reduce"] * (ranks // group) / (ranks // group - 1)
    return inside / size_bytes, across / size_bytes


def ladder(arguments):
    config = (arguments.configs or [os.path.relpath(ROOT / "configs/ladder.json")])[0]
    text = json.loads(pathlib.Path(config).read_text())
    ranks = text["run"].get("nproc", 1)
    if ranks < 2:
        raise ValueError(f"{config}: run.nproc: a ladder needs two ranks or more")
    steps = arguments.steps or text["run"]["steps"]
    groups = max(group for group in range(1, ranks) if ranks % group == 0)
    rungs = [("ddp", 0), ("zero1", 0), ("zero2", 0), ("zero3", 0), ("zero3", groups)]
    problems, hashes = [], {}
    print(f"{config}: {ranks} ranks, {steps} steps, {cpu()}\n")
    print(f"{'':18s} {'model state':>21s} {'bytes a':>17s} {'buffers':>9s} {'peak':>9s} {'sent, in S':>21s}\n"
          f"{'strategy':18s} {'MB a rank':>21s} {'padded parameter':>17s} {'MB':>9s} {'MB':>9s} {'':>21s} "
          f"{'tokens/s':>9s} {'loss':>9s}  parameters' hash\n"
          f"{'':18s} {'measured':>10s} {'planned':>10s} {'measured':>8s} {'planned':>8s} {'measured':>9s} "
          f"{'measured':>9s} {'measured':>10s} {'planned':>10s}")
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        for strategy, group in rungs:
            options = {"strategy": strategy, "shard_group": group}
            name = strategy + (f", groups of {group}" if group else "")
            everything = plan(config, options, ranks, work)
            planned, summary = counted(everything[strategy]), run(config, options, ranks, steps, work)
            measured = counted(summary)
            padded = summary["padded_parameters"]
            size = padded * (2 if summary["precision"] == "bf16" else 4)
            state = [one["memory_bytes"]["model_state"] for one in (measured, planned)]
            sent = [volume(one, ranks, group or ranks, size) for one in (measured, planned)]
            sent = [f"{inside:.4f}" + (f"+{across:.2f}" if across else "") for inside, across in sent]
            buffers, peak = (measured["memory_bytes"][key] / 1e6 for key in ("communication", "peak"))
            print(f"{name:18s} {state[0] / 1e6:10.3f} {state[1] / 1e6:10.3f} {state[0] / padded:8.4f} "
                  f"{state[1] / padded:8.4f} {buffers:9.3f} {peak:9.3f} {sent[0]:>10s} {sent[1]:>10s} "
                  f"{summary['tokens_per_second']:9.0f} {summary['final_train_loss']:9.6f}  {summary['params_hash']}",
                  flush=True)
            problems += differences(f"{name}, measured against planned", planned, measured)
            if not group:
                hashes[strategy] = summary["params_hash"]
    print(f"\n{padded} padded parameters; S = {size / 1e6:.3f} MB, their size in {summary['precision']}. "
          "Sent: a ring sends (N-1)/N of what is shown.\n"
          "In groups: inside them + across them; the order of summation differs, and so may the hash.")
    if len(set(hashes.values())) != 1:
        problems.append(f"the strategies end with different parameters: {hashes}")
    for problem in problems:
        print(f"NOT AS PLANNED: {problem}")
    if not problems:
        print("All strategies end with the same parameters, to the bit; every byte and every collective is as planned.")
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(prog="reproduce.py")
    parser.add_argument("command", choices=["reproduce", "ladder"])
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run, instead of the configuration's")
    parser.add_argument("configs", nargs="*", metavar="CONFIG")
    arguments = parser.parse_intermixed_args()
    try:
        return reproduce(arguments) if arguments.command == "reproduce" else ladder(arguments)
    except (Failure, OSError, ValueError, KeyError) as error:
        what = f"there is no key {error}" if isinstance(error, KeyError) else error
        print(f"{arguments.command}.sh: error: {what}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
