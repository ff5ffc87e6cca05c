"""Faults planted in the kernels and in zero.h, one at a time: each of them is found.

mutations.json lists them: the file, the text (found exactly once) and what replaces it, and what finds it. "plain",
"asan" and "tsan" are the builds of test_kernels.py, with the cases that show the fault (by values, guards, orders of
threads, bytes; by the sanitizer) and what is said then. "program" is the emulated program at two ranks: under some
order of its streams the fault changes a bit.
"""
import json
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, Run, environment
from test_emulated_program import SHAPE, curve, words
from test_kernels import KERNELS, check, make, program, start

MUTATIONS = json.loads((ROOT / "test" / "mutations.json").read_text())
assert len(MUTATIONS) == len({mutation["name"] for mutation in MUTATIONS})


def marked(mutations):
    return [pytest.param(mutation, id=re.sub(r"\W+", "-", mutation["name"]),
                         marks=[] if mutation.get("quick") else [pytest.mark.full]) for mutation in mutations]


def mutated(mutation):
    """The file's text with the fault in it."""
    text = (ROOT / mutation["file"]).read_text()
    for edit in mutation["edits"]:
        assert text.count(edit["old"]) == 1, f"found {text.count(edit['old'])} times in {mutation['file']}: {edit['old']}"
        text = text.replace(edit["old"], edit["new"])
    return text


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: re.sub(r"\W+", "-", mutation["name"]))
def test_the_text_is_there(mutation):
    mutated(mutation)


@pytest.fixture
def faulty(tmp_path):
    """faulty(mutation, kept, target): builds the target from a copy of the tree with the fault in it. kept: objects
    that the fault does not reach, taken from this tree's build."""

    def build(mutation, kept, target):
        for pattern in ("*.h", "*.cu", "*.cuh", "Makefile"):
            for path in ROOT.glob(pattern):
                shutil.copy2(path, tmp_path)
        for folder in ("cpu", "kernels", "test/kernels"):
            shutil.copytree(ROOT / folder, tmp_path / folder)
        (tmp_path / mutation["file"]).write_text(mutated(mutation))
        for path in kept:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            os.utime(copy)  # newer than the sources: not built again
        # A fault may leave a variable without use. -O1 is quick to compile.
        define = f"DEFINE_{mutation['precision']}=-DPRECISION_{mutation['precision'].upper()} -O1"
        subprocess.run(["make", "-C", tmp_path, f"-j{os.cpu_count()}", "DEVICE=emulator", "WARNINGS=", define,
                        str(target.relative_to(ROOT))], check=True, stdout=subprocess.DEVNULL)
        return tmp_path / target.relative_to(ROOT)

    return build


@pytest.mark.parametrize("mutation", marked(mutation for mutation in MUTATIONS if mutation["build"] != "program"))
def test_kernels_find_it(faulty, mutation):
    build, precision = mutation["build"], mutation["precision"]
    sound = program(build, precision)
    objects = [KERNELS / f"cpu_{precision}.o", KERNELS / f"main_{precision}.o",
               KERNELS / f"emulator_{build}.o" if build in ("asan", "tsan") else KERNELS.parent / "emulator.o"]
    make([sound, *objects])
    arguments = ["--set", mutation.get("set", "small"), "--runs", "3" if build == "plain" else "1"]
    for case in mutation["cases"]:
        arguments += ["--case", case]
    extra = {"TRAIN_GPT_BLOCKS": mutation["blocks"]} if "blocks" in mutation else {}
    check(start(sound, build, arguments, extra, os.cpu_count()))
    process = start(faulty(mutation, objects, sound), build, arguments, extra, os.cpu_count())
    output = process.stdout + process.stderr
    assert process.returncode != 0, output[-4000:]
    assert re.search(mutation["says"], output), output[-4000:]


@pytest.mark.parametrize("mutation", marked(mutation for mutation in MUTATIONS if mutation["build"] == "program"))
def test_orders_of_streams_find_it(faulty, mutation, texts, tmp_path):
    sound = ROOT / "build" / "emulator" / "train_gpt"
    make([sound])
    kept = [path for path in sound.parent.glob("*.o") if path.name != f"train_{mutation['precision']}.o"]

    def train(path, streams):
        log_dir = tmp_path / f"{'sound' if path == sound else 'faulty'}-{streams.replace(':', '-')}"
        options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "val_every": 0, "timeout": 60,
                   "log_dir": log_dir, **SHAPE, "precision": mutation["precision"], "strategy": mutation["strategy"],
                   "nproc": 2, "micro_batch": 1, "tokens_per_step": 33 * 4, "steps": 4}
        process = subprocess.run([path, *words(options)], env=environment({"TRAIN_GPT_STREAMS": streams}), timeout=600,
                                 stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        run = Run(process, log_dir)
        return curve(run) if run.code == 0 else run.code

    path = faulty(mutation, kept, sound)
    expected = train(sound, "eager")
    caught = []
    for streams in ("latest", *(f"random:{seed}" for seed in range(1, 6))):
        assert train(sound, streams) == expected
        if train(path, streams) != expected:
            caught.append(streams)
            break
    assert caught
