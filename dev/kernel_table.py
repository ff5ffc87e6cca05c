#!/usr/bin/env python3
"""The tables of kernels/README.md: what each operation moves and computes, and the least time of a step that follows.

    python3 dev/kernel_table.py           compares kernels/README.md with what bench_kernels says; exit status 1: differs
    python3 dev/kernel_table.py --write   writes it

Builds bench_kernels with the emulator; nothing is measured.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "kernels/README.md"
# An H100 SXM by its data sheet: 3.35 TB/s, 989.4 TFLOP/s in bf16 without sparsity, 450 GB/s of NVLink each way.
SHEET = ["--bandwidth", "3350", "--rate", "989.4", "--network", "450"]
# What copies and large products are seen to reach on it: nine tenths, and about seven.
REACHED = ["--bandwidth", "3015", "--rate", "693", "--network", "360"]
RUNS = {"124M": ["--preset", "124M", "--micro-batch", "64", "--ranks", "8"],
        "1558M": ["--preset", "1558M", "--micro-batch", "16", "--micro-batches", "8", "--ranks", "8"]}


def bench(*arguments):
    return subprocess.run([str(ROOT / "build/emulator/bench_kernels"), *arguments, "--markdown"], check=True,
                          capture_output=True, text=True).stdout


def main():
    subprocess.run(["make", "-s", "-C", str(ROOT), "DEVICE=emulator", "build/emulator/bench_kernels"], check=True)
    text = README.read_text()
    for name, run in RUNS.items():
        table, floor = bench(*run, *SHEET).rstrip().split("\n\n")
        reached = bench(*run, *REACHED).rstrip().split("\n\n")[1]
        block = f"<!-- {name} -->\n{table}\n\n- {floor}\n- {reached}\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)
    if sys.argv[1:] == ["--write"]:
        README.write_text(text)
        return 0
    if text != README.read_text():
        print("kernels/README.md: the tables differ from what bench_kernels says; dev/kernel_table.py --write renews them")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
