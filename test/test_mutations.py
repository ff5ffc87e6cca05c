"""Faults planted in the kernels, one at a time: the tests of test_kernels.py find each of them.

mutations.json lists them: the file, the text (found exactly once) and what replaces it, the cases that show the fault
and in which build they do ("plain": values, guards, orders of threads, bytes; or a sanitizer), and what is said then.
"""
import json
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
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
        for pattern in ("*.h", "*.cu", "*.cuh", "Makefile", "cpu/*", "kernels/*", "test/kernels/*"):
            for path in ROOT.glob(pattern):
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
        (tmp_path / mutation["file"]).write_text(mutated(mutation))
        for path in kept:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            os.utime(copy)  # newer than the sources: not built again
        # A fault may leave a variable without use.
        subprocess.run(["make", "-C", tmp_path, f"-j{os.cpu_count()}", "DEVICE=emulator", "WARNINGS=",
                        str(target.relative_to(ROOT))], check=True, stdout=subprocess.DEVNULL)
        return tmp_path / target.relative_to(ROOT)

    return build


@pytest.mark.parametrize("mutation", marked(MUTATIONS))
def test_it_is_caught(faulty, mutation):
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
