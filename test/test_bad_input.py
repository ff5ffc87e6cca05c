"""Bad input: one line that names the key or the file, exit code 2, nothing written; on one rank and on several."""
import struct

import pytest

from conftest import run_program


def shard(path, tokens, magic=20240520, version=1, count=None, width="H", cut=0):
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *([0] * 253))
    data = header + struct.pack(f"<{len(tokens)}{width}", *tokens)
    path.write_bytes(data[:len(data) - cut])
    return path


def make_cases(folder, texts):
    good = texts / "train.txt"
    (folder / "empty.txt").write_bytes(b"")
    (folder / "short.txt").write_bytes(b"a" * 50)
    (folder / "directory").mkdir()
    (folder / "file").write_bytes(b"x")
    (folder / "empty.bin").write_bytes(b"")
    (folder / "garbage.bin").write_bytes(b"hello, world " * 1000)
    shard(folder / "magic.bin", [1] * 5000, magic=20240326)
    shard(folder / "version.bin", [1] * 5000, version=9)
    shard(folder / "truncated.bin", [1] * 5000, cut=2)
    shard(folder / "long.bin", [1] * 5000, count=4999)
    shard(folder / "vocabulary.bin", [1] * 100 + [300] * 5000)
    for name, text in {"unknown": '{"batch": {"micro_bach": 3}}', "section": '{"bacth": {"micro_batch": 3}}',
                       "type": '{"batch": {"micro_batch": "three"}}', "fraction": '{"run": {"steps": 1.5}}',
                       "range": '{"optimizer": {"beta1": 1.5}}', "syntax": '{"run": {"steps": 3}', "null": '{"run": {"steps": null}}',
                       "list": '[1, 2]', "deep": "[" * 100000, "twice": '{"run": {"steps": 3, "steps": 4}}',
                       "misplaced": '{"run": {"micro_batch": 4}}'}.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "zero.json").write_text('{"run": {"log_dir": "a\\u0000b"}}')
    tokens = b"".join(bytes([1, byte % 256]) for byte in range(300))
    (folder / "large.tok").write_bytes(struct.pack("<256I", 20240328, 2, 300, 299, *([0] * 252)) + tokens)
    (folder / "late.txt").write_bytes(b"a" * 64 * 13 + b"\xc8" * 64 + b"a" * 64 * 50)  # window 13: of the second rank
    for name in ("metrics.jsonl", "summary.json"):
        (folder / f"with_{name}" / name).mkdir(parents=True)
    data = ["--train-data", good]
    return {
        "unknown key": (data + [folder / "unknown.json"], ["micro_bach", "micro_batch", "unknown.json"]),
        "unknown section": (data + [folder / "section.json"], ["bacth", "batch"]),
        "wrong type": (data + [folder / "type.json"], ["micro_batch", "type.json"]),
        "a fraction of a step": (data + [folder / "fraction.json"], ["steps", "1.5"]),
        "out of range": (data + [folder / "range.json"], ["beta1", "1.5"]),
        "syntax": (data + [folder / "syntax.json"], ["syntax.json"]),
        "null": (data + [folder / "null.json"], ["steps"]),
        "not an object": (data + [folder / "list.json"], ["list.json"]),
        "nesting bomb": (data + [folder / "deep.json"], ["deep.json"]),
        "key given twice": (data + [folder / "twice.json"], ["steps"]),
        "key in another section": (data + [folder / "misplaced.json"], ["micro_batch", "batch"]),
        "binary configuration": (data + [folder / "binary.json"], ["binary.json"]),
        "missing configuration": (data + [folder / "nowhere.json"], ["nowhere.json"]),
        "unknown flag": (data + ["--strateg", "ddp"], ["--strateg", "strategy"]),
        "flag without value": (data + ["--steps"], ["--steps"]),
        "flag with a word": (data + ["--steps", "many"], ["steps", "many"]),
        "flag out of range": (data + ["--micro-batch", "0"], ["micro-batch", "0"]),
        "not a number": (data + ["--learning-rate", "nan"], ["learning-rate"]),
        "unknown strategy": (data + ["--strategy", "zero4"], ["strategy", "zero4", "zero3"]),
        "offload to come": (data + ["--offload", "optimizer"], ["offload", "optimizer", "none"]),
        "recomputation to come": (data + ["--recompute", "selective"], ["recompute", "selective", "full"]),
        "heads that ranks cannot share": (data + ["--tensor-parallel", "3", "--nproc", "3"],
                                          ["tensor_parallel", "n_head", "1, 2, 4"]),
        "unknown preset": (data + ["--preset", "gpt2-125M"], ["gpt2-125M", "gpt2-124M"]),
        "heads that do not divide": (data + ["--n-head", "3", "--n-embd", "128"], ["n_head", "n_embd", "3", "128"]),
        "sequence beyond context": (data + ["--sequence-length", "128", "--context-length", "64"],
                                    ["sequence_length", "context_length", "128", "64"]),
        "batch that is not whole": (data + ["--tokens-per-step", "1000"], ["tokens_per_step", "1000"]),
        "learning rates": (data + ["--learning-rate", "1e-5", "--min-learning-rate", "1e-3"], ["min_learning_rate"]),
        "no data": ([], ["train_data"]),
        "missing data": (["--train-data", folder / "nowhere.txt"], ["nowhere.txt"]),
        "missing shards": (["--train-data", folder / "nowhere_*.bin"], ["nowhere_*.bin"]),
        "data is a directory": (["--train-data", folder / "directory"], ["directory"]),
        "empty text": (["--train-data", folder / "empty.txt"], ["empty.txt"]),
        "short text": (["--train-data", folder / "short.txt"], ["short.txt"]),
        "empty shard": (["--train-data", folder / "empty.bin"], ["empty.bin"]),
        "foreign shard": (["--train-data", folder / "garbage.bin"], ["garbage.bin"]),
        "foreign magic": (["--train-data", folder / "magic.bin"], ["magic.bin", "20240326"]),
        "unknown version": (["--train-data", folder / "version.bin"], ["version.bin", "9"]),
        "truncated shard": (["--train-data", folder / "truncated.bin"], ["truncated.bin"]),
        "shard with a tail": (["--train-data", folder / "long.bin"], ["long.bin"]),
        "token beyond the vocabulary": (["--train-data", folder / "vocabulary.bin"], ["vocabulary.bin", "300", "256"]),
        "validation token beyond": (data + ["--val-data", folder / "vocabulary.bin"], ["vocabulary.bin", "300", "256"]),
        "bytes beyond the vocabulary": (data + ["--vocab-size", "65"], ["train.txt", "65"]),
        "missing validation": (data + ["--val-data", folder / "nowhere.txt"], ["nowhere.txt"]),
        "missing vocabulary file": (data + ["--tokenizer", folder / "nowhere.tok"], ["nowhere.tok"]),
        "zero character": (data + [folder / "zero.json"], ["zero.json"]),
        "vocabulary larger than the model's": (data + ["--tokenizer", folder / "large.tok"], ["large.tok", "300", "256"]),
        "prompt beyond the vocabulary": (data + ["--sample-every", "5", "--vocab-size", "128", "--sample-prompt", "\u00ff"],
                                         ["128"]),
        "validation token of another rank": (["--train-data", good, "--vocab-size", "128", "--val-data", folder / "late.txt",
                                              "--nproc", "2"], ["late.txt", "200", "128"]),
        "log directory with too long a name": (data + ["--log-dir", "p/q/" + 300 * "x"], ["log_dir", "xxx"]),
        "metrics that cannot be written": (data + ["--log-dir", folder / "with_metrics.jsonl"], ["log_dir", "metrics.jsonl"]),
        "summary that cannot be replaced": (data + ["--log-dir", folder / "with_summary.json"], ["log_dir", "summary.json"]),
        "log directory below a file": (data + ["--log-dir", folder / "file" / "log"], ["log_dir", "file"]),
        "log directory is a file": (data + ["--log-dir", folder / "file"], ["log_dir", "file"]),
        "log directory nobody can make": (data + ["--log-dir", "/proc/train_gpt"], ["log_dir", "/proc/train_gpt"]),
    }


NAMES = ["unknown key", "unknown section", "wrong type", "a fraction of a step", "out of range", "syntax", "null",
         "not an object", "nesting bomb", "key given twice", "key in another section", "binary configuration",
         "missing configuration", "unknown flag", "flag without value", "flag with a word", "flag out of range",
         "not a number", "unknown strategy", "offload to come", "recomputation to come", "heads that ranks cannot share",
         "unknown preset", "heads that do not divide", "sequence beyond context", "batch that is not whole",
         "learning rates", "no data", "missing data", "missing shards", "data is a directory", "empty text",
         "short text", "empty shard", "foreign shard", "foreign magic", "unknown version", "truncated shard",
         "shard with a tail", "token beyond the vocabulary", "validation token beyond", "bytes beyond the vocabulary",
         "missing validation", "missing vocabulary file", "zero character", "vocabulary larger than the model's",
         "prompt beyond the vocabulary", "validation token of another rank", "log directory with too long a name",
         "metrics that cannot be written", "summary that cannot be replaced", "log directory below a file", "log directory is a file",
         "log directory nobody can make"]


@pytest.fixture(scope="session")
def cases(tmp_path_factory, texts):
    return make_cases(tmp_path_factory.mktemp("bad"), texts)


def test_every_case_is_listed(cases):
    assert sorted(cases) == sorted(NAMES)


def check(arguments, words, folder):
    if "--log-dir" not in arguments:
        arguments = arguments + ["--log-dir", folder / "log"]
    process = run_program(*arguments, "--val-every", "1", cwd=folder)
    assert process.returncode == 2, (process.returncode, process.stdout, process.stderr)
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("train_gpt: error: ")
    for word in words:
        assert str(word) in lines[0] or str(word).replace("-", "_") in lines[0], lines[0]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_one_line_exit_2_nothing_written(cases, name, tmp_path):
    check(*cases[name], tmp_path)
    for key in ("metrics.jsonl", "summary.json"):
        folder = next(path for path in cases["data is a directory"][0] if "directory" in str(path)).parent / f"with_{key}"
        assert [path.name for path in folder.iterdir()] == [key]


@pytest.mark.parametrize("name", ["unknown key", "truncated shard", "log directory is a file"])
def test_on_two_ranks_too(cases, name, tmp_path):
    arguments, words = cases[name]
    check(arguments + ["--nproc", 2], words, tmp_path)


def test_a_bad_token_found_late_is_a_failure_of_the_run(tmp_path):
    """Only one window is bad, and with this seed it is not in the first step: exit code 1."""
    tokens = [1] * 20000
    tokens[10000] = 999
    path = shard(tmp_path / "late.bin", tokens)
    process = run_program("--train-data", path, "--steps", 1000, "--n-embd", 32, "--micro-batch", 2)
    assert process.returncode == 1, process.stderr
    assert "late.bin" in process.stderr and "999" in process.stderr
