#!/usr/bin/env python3
"""What test/test_formats.py asks of the real library: Hugging Face's transformers.

    transformers_check.py logits DIRECTORY TOKEN...   loads a directory, prints the logits behind each token, in fp32
    transformers_check.py train DIRECTORY FILE.json   writes a GPT-2 of an odd shape, and what steps of training give

Needs what dev/make_hf_goldens.py needs, whose way of training this is.
"""
import json
import pathlib
import sys

import torch
import transformers

import make_hf_goldens as goldens

SHAPE = dict(n_layer=3, n_head=6, n_embd=48, n_positions=32, vocab_size=301)


def logits(directory, tokens):
    model, info = transformers.GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"{directory} does not load as it is: {wrong}"
    with torch.no_grad():
        rows = model.float().eval()(torch.tensor([tokens])).logits[0]
    for row in rows:
        print(" ".join(f"{x:.9g}" for x in row.tolist()))


def train(directory, path):
    goldens.SHAPE = SHAPE
    model = goldens.make_model()
    model.save_pretrained(directory, safe_serialization=True)
    torch.manual_seed(22)
    batches = torch.randint(0, SHAPE["vocab_size"], (1, 6, SHAPE["n_positions"] + 1)).expand(5, -1, -1)
    _, losses, norms = goldens.train(model, batches)
    pathlib.Path(path).write_text(json.dumps({"rows": batches[0].tolist(), "losses": losses, "norms": norms}))


if __name__ == "__main__":
    if sys.argv[1] == "logits":
        logits(sys.argv[2], [int(word) for word in sys.argv[3:]])
    else:
        train(sys.argv[2], sys.argv[3])
