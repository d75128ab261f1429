"""A small language model of bytes, and 24 clients who adapt it to manual pages of six languages.

    export PYTHONPATH=. MANUAL_PAGES=pages.parquet
    python manual_pages.py small-gpt2     # pretrains the model that all start from
    coterie run manual-pages.toml

`pages.parquet` has the columns `language` and `text`. Without it, made-up pages of six made-up
languages stand in, to try the commands.
"""

import argparse
import os

import numpy as np
import pandas as pd
import torch
import transformers

import coterie

LANGUAGES = ("de", "fr", "nl", "pt", "ru", "sv")
PRETRAINED = ("de",)  # what the model has seen; of a model of all six, clients learn nothing new
CLIENTS = 4  # of each language
LENGTH = 64  # bytes of a sample
SAMPLES, TESTED = 70, 60  # of a client: to train and validate, and to test
PUBLIC = 2  # samples of each language that all clients have
BYTES = 256


def load_pages(path: str | None = None) -> dict[str, list[bytes]]:
    """Return the pages of each language as bytes, from a file or made up."""
    path = path or os.environ.get("MANUAL_PAGES")
    if path is None:
        return make_up_pages()
    table = pd.read_parquet(path)
    return {language: [text.encode() for text in table.text[table.language == language]] for language in LANGUAGES}


def make_up_pages() -> dict[str, list[bytes]]:
    """Return pages of made-up words: each language has its own letters and its own words."""
    pages = {}
    for number, language in enumerate(LANGUAGES):
        draw = np.random.default_rng(number)
        letters = draw.permutation(np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8))[:12]
        words = [bytes(draw.choice(letters, draw.integers(2, 8))) for _ in range(80)]
        pages[language] = [b" ".join(draw.choice(words, 700)) for _ in range(24)]
    return pages


def cut_windows(pages: list[bytes], count: int, draw: np.random.Generator) -> np.ndarray:
    """Return samples: windows at random places of the pages, [samples, bytes]."""
    text = np.frombuffer(b"\n".join(pages), np.uint8)
    starts = draw.integers(0, len(text) - LENGTH, count)
    return text[starts[:, None] + np.arange(LENGTH)].astype(np.int64)


def share_pages(pages: list[bytes], part: int) -> list[bytes]:
    """Return a part of a language's pages: 0 to pretrain, 1 to test, from 2 on of one client each."""
    parts = 2 + CLIENTS
    return pages[part::parts]


def federation(pages: str | None = None, seed: int = 0) -> coterie.Federation:
    """Return the clients; each has pages that no other has, and all of a language share the test's.

    All have a few samples of every language, from pages that are no client's.
    """
    draw, texts = np.random.default_rng(seed), load_pages(pages)
    other = np.random.default_rng([seed, 1])
    shared = np.concatenate([cut_windows(share_pages(texts[one], 0), PUBLIC, other) for one in LANGUAGES])
    owned, tests, clusters = {}, {}, {}
    for number, language in enumerate(LANGUAGES):
        held_out = cut_windows(share_pages(texts[language], 1), TESTED, draw)
        for place in range(CLIENTS):
            name = f"{language}-{place}"
            owned[name] = cut_windows(share_pages(texts[language], 2 + place), SAMPLES, draw)
            tests[name], clusters[name] = held_out, number
    ids = np.concatenate(list(owned.values()))
    tested = np.concatenate(list(tests.values()))
    data = coterie.from_arrays(
        {"input_ids": ids},
        ids,
        clients=[name for name, one in owned.items() for _ in one],
        test=({"input_ids": tested}, tested, [name for name, one in tests.items() for _ in one]),
        clusters=clusters,
        split=coterie.Split(train=SAMPLES - 10, validation=10),
        name="manual-pages",
    )
    return data.with_public_set(coterie.from_arrays({"input_ids": shared}, shared, num_clients=1))


def pretrain(folder: str, pages: str | None = None, steps: int = 1500) -> list[float]:
    """Train a small GPT-2 on German pages that no client has; return its losses."""
    texts, draw = load_pages(pages), np.random.default_rng(0)
    mixed = [page for language in PRETRAINED for page in share_pages(texts[language], 0)]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=BYTES, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        ids = torch.from_numpy(cut_windows(mixed, 32, draw))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    model.save_pretrained(folder)
    return losses


def measure_start(folder: str, pages: str | None = None, seed: int = 0) -> float:
    """Return the mean perplexity of the clients' test sets before anybody has trained."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), []
    data = federation(pages, seed)
    with torch.no_grad():
        for client in range(len(data)):
            ids = data.tests[data.test_of[client]].x.long()
            found.append(float(model(input_ids=ids, labels=ids).loss.exp()))
    return sum(found) / len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the model is written")
    parser.add_argument("--pages", help="a parquet file; that of MANUAL_PAGES when not given")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    pretrain(given.folder, given.pages, given.steps)
    for number in range(3):
        start = measure_start(given.folder, given.pages, number)
        print(f"seed {number}: perplexity {start:.2f} before training")
