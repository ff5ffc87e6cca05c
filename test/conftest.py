"""What all tests share: the program, how to run it, a text to train on."""
import json
import os
import pathlib
import random
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "train_gpt"
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run what takes long, too")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: takes long; runs with --full")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    kept = [item for item in items if item.get_closest_marker("full") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


class Run:
    """A finished run of the program: exit code, output, and what it wrote to its log directory."""

    def __init__(self, process, log_dir):
        self.code, self.stdout, self.stderr, self.log_dir = process.returncode, process.stdout, process.stderr, log_dir

    @property
    def summary(self):
        return json.loads((self.log_dir / "summary.json").read_text())

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.log_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self):
        return [line for line in self.metrics if "loss" in line]

    @property
    def losses(self):
        return [line["loss"] for line in self.steps]

    @property
    def norms(self):
        return [line["grad_norm"] for line in self.steps]


def environment(extra=None):
    """The tests' environment without what would make a process believe it is a rank, or bind its threads."""
    prefixes = ("OMPI_", "PMI", "SLURM_", "OMP_", "GOMP_", "TRAIN_GPT_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(key, None)
    env.update(extra or {})
    return env


def run_program(*arguments, env=None, timeout=300, cwd=None):
    return subprocess.run([str(PROGRAM), *map(str, arguments)], env=environment(env), timeout=timeout, cwd=cwd,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")


@pytest.fixture
def train(tmp_path, texts):
    """train(flag=value, ...): runs the program on the text with a log directory, and expects exit code 0."""
    count = [0]

    def run(*arguments, expect=0, env=None, timeout=300, **flags):
        count[0] += 1
        log_dir = tmp_path / f"log{count[0]}"
        options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "log_dir": log_dir, "steps": 20,
                   "val_every": 0, "learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_steps": 10}
        options.update(flags)
        words = list(arguments)
        for key, value in options.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += ["--" + key.replace("_", "-"), text]
        result = Run(run_program(*words, env=env, timeout=timeout), log_dir)
        assert result.code == expect, f"exit code {result.code}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result

    return run


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with train.txt and val.txt: sentences of made-up words with a skewed distribution, always the same."""
    draw = random.Random(7)
    syllables = ["ba", "ro", "ti", "el", "su", "na", "mo", "ker", "in", "dal", "ve", "ost"]
    words = ["".join(draw.choice(syllables) for _ in range(draw.randint(1, 4))) for _ in range(300)]
    weights = [1.0 / (rank + 1) for rank in range(len(words))]

    def text(sentences):
        lines = (" ".join(draw.choices(words, weights, k=draw.randint(3, 12))).capitalize() for _ in range(sentences))
        return ". ".join(lines) + ".\n"

    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(text(5000))
    (folder / "val.txt").write_text(text(300))
    return folder
