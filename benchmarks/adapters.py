r"""Rounds of adapters on one frozen model: all clients in one pass against a lean loop over peft.

    python benchmarks/adapters.py --out docs/reference/runs/performance/adapters.json
    python benchmarks/adapters.py --device cuda --precision bf16 --turns 5 \\
        --cells bert:768:12:12:4:128 --out adapters-gpu.json      (a BERT of 100 million weights)

A round is the local training of each client: steps of AdamW on its own batches. The lean loop is what
peft and PyTorch alone take: one model, whose adapter is that of one client after another, a fused
optimizer, and nothing else. Sides are timed in turn in one process, and ratios are medians over the
turns. Memory is measured in a process of its own for each side: what the model, the data and a round
add to the libraries at most (on a device: the most that PyTorch has allocated).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _measured import keep_freed_memory, resident
from torch import Tensor, nn
from torch.nn import functional

from coterie._util.origin import write_results
from coterie.data.source import InputPart
from coterie.engine._base import Engine, cross_entropy
from coterie.engine._choice import default_block, make_engine
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining
from coterie.functional.losses import make_loss
from coterie.models.given import InputConversion
from coterie.models.layout import Layout
from coterie.rng import Rng

# transformers imports it where it is, and it fails where it was built for another PyTorch.
sys.modules["torchvision"] = None  # type: ignore[assignment]
import peft  # noqa: E402
import transformers  # noqa: E402

MIB, SAMPLES, VOCABULARY, CLASSES, RANK, RATE = 1 << 20, 256, 1000, 4, 8, 1e-3


@dataclass(frozen=True)
class Cell:
    """One model and its batches.

    Args:
        kind: "bert" (classes of texts) or "llama" (the next token), both with masks.
        width: of the hidden layers.
        layers: how many.
        heads: of the attention.
        batch: samples of a step.
        words: of each sample.
        dropout: probability; in BERT's layers and attention, or before the adapters of Llama.
    """

    kind: str
    width: int
    layers: int
    heads: int
    batch: int
    words: int
    dropout: float = 0.0

    @staticmethod
    def read(text: str) -> "Cell":
        """Return a cell from its text, such as bert:64:2:4:8:32, with the dropout as a last number."""
        kind, *numbers = text.split(":")
        dropout = float(numbers[5]) if len(numbers) > 5 else 0.0
        return Cell(kind, *map(int, numbers[:5]), dropout)  # type: ignore[arg-type]

    def make_module(self) -> nn.Module:
        """Return the model with random weights and an adapter."""
        with Rng(0).temporary_torch_seed("benchmark.adapters"):
            return self._make_module()

    def _make_module(self) -> nn.Module:
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "max_position_embeddings": self.words,
            "pad_token_id": 0,
        }  # fmt: skip
        if self.kind == "bert":
            sizes |= {"num_labels": CLASSES, "intermediate_size": 4 * self.width}
            drop = self.dropout
            config = transformers.BertConfig(
                **sizes, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop
            )
            lora = peft.LoraConfig(r=RANK, task_type="SEQ_CLS", target_modules=["query", "value"])
            return peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)
        config = transformers.LlamaConfig(**sizes, intermediate_size=3 * self.width)
        lora = peft.LoraConfig(
            r=RANK, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=self.dropout
        )  # fmt: skip
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


class Sides:
    """The two ways to train a round of some clients, from equal adapters and on equal batches.

    Args:
        cell: the model and its batches.
        clients: how many.
        steps: of each in a round.
        device: where all is.
        precision: "full" or "bf16".
    """

    def __init__(self, cell: Cell, clients: int, steps: int, device: str, precision: str) -> None:
        self.cell, self.clients, self.device = cell, clients, torch.device(device)
        self.precision = precision
        module = cell.make_module()
        stream = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (SAMPLES, cell.words), generator=stream)
        self.mask = torch.ones_like(self.ids)
        # Texts of different lengths: a quarter of the places of every second sample pad.
        self.mask[::2, -cell.words // 4 :] = 0
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=stream)
        if cell.kind == "llama":
            self.y = torch.where(self.mask == 1, self.ids, -100)
        self.places = torch.randint(0, SAMPLES, (clients, steps, cell.batch), generator=stream)
        self.plain = module.to(self.device).train()
        self.trained = [one for one in self.plain.parameters() if one.requires_grad]
        # Data of the loop are where the model is.
        self.ids, self.mask, self.y = (one.to(device) for one in (self.ids, self.mask, self.y))

    def prepare_shared(self) -> None:
        """Make the engine, and what it trains; the loop needs none of it."""
        cell, module, device = self.cell, self.plain, self.device
        parts = [InputPart(name, (cell.words,), True) for name in ("input_ids", "attention_mask")]
        self.layout = Layout(module, torch.float32, InputConversion(tuple(parts))).to(device.type)
        self.rows = self.layout.own_values().repeat(self.clients, 1)
        loss = cross_entropy if cell.kind == "bert" else make_loss("causal-lm")
        x = torch.cat([self.ids, self.mask], 1).float().to(device)
        y = self.y.to(device)
        self.engine: Engine = make_engine(
            "shared-backbone", self.layout, loss, x[:8], y[:8], precision=self.precision
        )
        # Dropout is not compared: the loop draws from PyTorch's generator.
        keys = torch.arange(self.clients).to(device) if self.layout.draws[True] else None
        self.work = TrainingWork(
            RawSamples(x, y, torch.float32), self.places.to(device),
            torch.full(self.places.shape[:2], cell.batch),
            LocalTraining(optimizer="adamw", lr=RATE), draw_keys=keys,
        )  # fmt: skip

    def run_shared(self) -> Tensor:
        """Train all clients in passes of blocks; return their adapters."""
        rows = self.rows.clone()
        self.engine.train(rows, self.work, default_block(self.layout, self.device.type))
        return rows[:, : self.layout.trainable]

    def run_loop(self) -> Tensor:
        """Train one client after another with peft and PyTorch alone; return their adapters."""
        start = [one.detach().clone() for one in self.trained]
        found = []
        for client in range(self.clients):
            for one, value in zip(self.trained, start, strict=True):
                one.data.copy_(value)
            optimizer = torch.optim.AdamW(self.trained, RATE, weight_decay=0.01, fused=True)
            for places in self.places[client]:
                optimizer.zero_grad()
                self._mean_loss(places.to(self.device)).backward()
                optimizer.step()
            found.append(torch.cat([one.detach().flatten() for one in self.trained]))
        for one, value in zip(self.trained, start, strict=True):
            one.data.copy_(value)
        return torch.stack(found)

    def _mean_loss(self, places: Tensor) -> Tensor:
        bf16 = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            ids, mask = self.ids[places], self.mask[places]
            outputs = self.plain(input_ids=ids, attention_mask=mask).logits.float()
        y = self.y[places]
        if self.cell.kind == "bert":
            return functional.cross_entropy(outputs, y)
        # Each sample counts once, as in the loss causal-lm.
        lost = functional.cross_entropy(outputs[:, :-1].transpose(1, 2), y[:, 1:], reduction="none")
        return (lost.sum(1) / (y[:, 1:] != -100).sum(1)).mean()

    def measure_time(self, run: Callable[[], Tensor]) -> float:
        """Return the seconds of a round."""
        started = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def measure_memory(given: dict[str, Any], side: str) -> float:
    """Return the MiB that one side takes in this process, the libraries left out."""
    before = resident() or 0
    sides = Sides(Cell(**given.pop("cell")), **given)
    if side == "shared":
        sides.prepare_shared()
    run = sides.run_shared if side == "shared" else sides.run_loop
    run()
    if sides.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return ((resident(name="VmHWM") or 0) - before) / MIB


def start_memory(given: dict[str, Any], side: str) -> float:
    """Return what `measure_memory` does in a process of its own."""
    text = json.dumps({**given, "cell": asdict(given["cell"])})
    command = [sys.executable, __file__, "--memory", side, "--given", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.splitlines()[-1])


def measure(given: dict[str, Any], turns: int) -> dict[str, Any]:
    """Return the row of a cell and a number of clients."""
    sides, cell = Sides(**given), given["cell"]
    sides.prepare_shared()
    loop, shared = sides.run_loop(), sides.run_shared()
    if not cell.dropout and given["precision"] == "full":
        # The same adapters; Adam makes steps of equal size of gradients that are rounding.
        apart = (loop - shared).abs() > 1e-4
        assert float(apart.double().mean()) < 0.01, "the two sides train other adapters"
    pairs = []
    for _ in range(turns):
        pairs.append((sides.measure_time(sides.run_loop), sides.measure_time(sides.run_shared)))
    ratios = sorted(one / other for one, other in pairs)
    weights = sum(one.numel() for one in sides.plain.parameters())
    return {
        "model": f"{cell.kind}, {cell.layers} layers of {cell.width}",
        "weights": weights,
        "dropout": cell.dropout,
        "batch": f"{cell.batch} x {cell.words}",
        "clients": given["clients"],
        "lean loop, ms a step": 1e3 * statistics.median(one for one, _ in pairs) / sides.places[..., 0].numel(),
        "one pass, ms a step": 1e3 * statistics.median(one for _, one in pairs) / sides.places[..., 0].numel(),
        "times lean": statistics.median(ratios),
        "from": ratios[0],
        "to": ratios[-1],
        "lean loop, MiB": start_memory(given, "loop"),
        "one pass, MiB": start_memory(given, "shared"),
    }  # fmt: skip


def main() -> None:
    """Measure, and write the file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--cells", nargs="+", metavar="KIND:WIDTH:LAYERS:HEADS:BATCH:WORDS[:DROPOUT]",
        default=["bert:64:2:4:8:32", "bert:64:2:4:8:32:0.1", "llama:64:2:4:4:16", "bert:256:4:4:8:32"],
    )  # fmt: skip
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=2, help="of each client in a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="full", choices=["full", "bf16"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", choices=["loop", "shared"], help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of peft about transformers
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.memory:
        print(measure_memory(asked.given, asked.memory))
        return
    rows = []
    for cell in map(Cell.read, asked.cells):
        for clients in asked.clients:
            given = {
                "cell": cell, "clients": clients, "steps": asked.steps, "device": asked.device,
                "precision": asked.precision,
            }  # fmt: skip
            rows.append(measure(given, asked.turns))
            print(rows[-1], flush=True)
    if asked.out:
        settings = {name: value for name, value in vars(asked).items() if name not in ("memory", "given")}  # fmt: skip
        write_results(asked.out, rows, ("engine", "models"), settings)


if __name__ == "__main__":
    main()
