"""The training loop and its command: `python -m engine.demo_training.train --out DIR`.

Does not know: how text becomes rows, what a layer computes, how a checkpoint is judged.

1. Seeds decide rows and weights; steps done and losses are written to DIR/record.json after every phase, a line every LOG_EVERY steps
   to DIR/log.txt.
2. After every phase DIR/<phase>/ holds a checkpoint as it would ship; DIR/model/ is the last one.
3. A step whose loss is not finite stops the run: no later number could be trusted.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo_training import corpus as corpora
from engine.demo_training.export import load, save
from engine.demo_training.losses import DEPTH_WEIGHTS, Losses, TokenLoss, losses_of, token_loss
from engine.demo_training.network import Network
from engine.demo_training.parts import MlpSparse
from engine.demo_training.recipe import RECIPE, TOY, Phase
from engine.demo_training.rows import Batch, Rows
from engine.demo_training.shape import Shape

__all__ = ["Run", "Trainer", "main", "phases_of", "share_rate", "train"]

TOKENIZER = Path(__file__).resolve().parent.parent / "demo_model"
UNTIMED_STEPS = 4  # compilation and first allocations
LOG_EVERY = 50
CLIP = 1.0


def share_rate(phase: Phase, share: float, step: int) -> float:
    """The learning rate after `share` of the phase, in [0, 1], at `step`: linear warm-up, then a cosine from rate to rate_end."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return (phase.rate_end + (phase.rate - phase.rate_end) * cosine) * min(1.0, (step + 1) / phase.warm_steps)


class Trainer:
    """Network, optimiser and log of one run; `run` goes through a phase."""

    def __init__(self, network: Network, out: Path, device: torch.device, *, compiled: bool, say: Callable[[str], None] = print) -> None:
        self.network, self.out, self.device, self.say = network.to(device), out, device, say
        out.mkdir(parents=True, exist_ok=True)
        self.routers = [layer.mlp for layer in network.model.layers if isinstance(layer.mlp, MlpSparse)]
        self.indexer = [value for name, value in network.named_parameters() if ".indexer." in name]
        self.others = [value for name, value in network.named_parameters() if ".indexer." not in name]
        self.optimizer = torch.optim.AdamW(self._groups(), lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.loss: TokenLoss = token_loss
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # a layer's code is compiled for each kind of layer and each shape of rows
            # Rows have few shapes, each worth its own code; scores have a shape for every block of queries.
            network.compile_parts(functools.partial(torch.compile, dynamic=False), functools.partial(torch.compile, dynamic=True))
            self.loss = torch.compile(token_loss, dynamic=False)

    def _groups(self) -> list[dict[str, Any]]:
        """Matrices decay by 0.1; vectors, the embedding and the head do not. Indexers have a rate of their own."""
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, value in self.network.named_parameters():
            decays = value.dim() > 1 and "embed_tokens" not in name and "lm_head" not in name
            groups.setdefault((".indexer." in name, decays), []).append(value)
        return [{"params": values, "weight_decay": 0.1 if decays else 0.0, "indexer": index} for (index, decays), values in groups.items()]

    def step(self, batch: Batch, phase: Phase, rate: float) -> Losses:
        """One optimiser step at `rate`. Returns the losses before it."""
        out = self.network(batch.tokens[:, :-1], batch.positions, sparse=phase.sparse, sampled=batch.sampled)
        losses = losses_of(self.network, batch, out, self.loss)
        losses.total().backward()
        for parameters in (self.indexer, self.others):
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (phase.indexer_factor if group["indexer"] else 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for router, taken in zip(self.routers, out.loads[: len(self.routers)], strict=True):
            router.gate.e_score_correction_bias += phase.bias_step * rate / phase.rate * torch.sign(taken.mean() - taken)
        return losses

    def run(self, phase: Phase, batches: Iterator[Batch], seconds: float) -> dict[str, Any]:
        """One phase: at most `seconds` after its first steps, or exactly `phase.steps`. Returns its record."""
        start, clock, step, share = time.monotonic(), 0.0, 0, 0.0
        curve: list[list[float]] = []
        while share < 1.0:
            losses = self.step(next(batches).to(self.device), phase, share_rate(phase, share, step))
            step += 1
            if step <= UNTIMED_STEPS:
                self._settle()
                clock = time.monotonic()
            elapsed = time.monotonic() - clock
            share = step / phase.steps if phase.steps else elapsed / seconds
            if step % LOG_EVERY == 0 or share >= 1.0 or step <= UNTIMED_STEPS:
                curve.append(self._log(phase, step, time.monotonic() - start, losses))
        self._settle()
        return {
            "phase": dataclasses.asdict(phase), "steps": step, "seconds": round(time.monotonic() - start, 1),
            "columns": ["step", "next token", "mtp 1", "mtp 2", "mtp 3", "divergence 0", "divergence 1", "divergence mtp"], "curve": curve,
        }  # fmt: skip

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _log(self, phase: Phase, step: int, elapsed: float, losses: Losses) -> list[float]:
        numbers = torch.stack([losses.next_token, *losses.drafts, *losses.divergences]).tolist()
        if not all(map(math.isfinite, numbers)):
            raise FloatingPointError(f"phase {phase.name}, step {step}: losses {numbers}")
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        line = f"{phase.name} {step} {elapsed:.1f}s {' '.join(f'{number:.4f}' for number in numbers)} {peak:.0f}GiB"
        with (self.out / "log.txt").open("a") as log:
            log.write(line + "\n")
        self.say(line)
        return [float(step), *(round(number, 4) for number in numbers)]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a run starts from. `scale` multiplies the phases' seconds; `start` is a checkpoint to go on from, None for fresh weights."""

    corpus: corpora.Corpus
    tokenizer: Path
    phases: tuple[Phase, ...]
    shape: Shape
    seed: int = 1
    scale: float = 1.0
    start: Path | None = None
    compiled: bool = False


def train(run: Run, out: Path) -> Path:
    """Go through a run's phases, write checkpoints and the record into `out`. Returns the last checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(run.seed)
    network = load(run.start, run.shape, dtype) if run.start else Network(run.shape, dtype)
    trainer = Trainer(network, out, device, compiled=run.compiled)
    encoder = Tokenizer.from_file(str(run.tokenizer / "tokenizer.json"))
    record: dict[str, Any] = {
        "seed": run.seed,
        "start": run.start.name if run.start else None,
        "corpus": run.corpus.digest,
        "corpus_python": run.corpus.python,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "depth_weights": DEPTH_WEIGHTS,
        "phases": [],
    }
    for phase in run.phases:
        rows = Rows(run.corpus, encoder, phase.mix, seed=run.seed, phase=phase.name, positions_max=run.shape.positions_max)
        with contextlib.closing(rows.ahead(0)) as batches:
            record["phases"].append(trainer.run(phase, batches, phase.seconds * run.scale))
        (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        save(network, out / phase.name, run.tokenizer)
    save(network, out / "model", run.tokenizer)
    return out / "model"


def phases_of(toy: bool, names: str | None, steps: str | None) -> tuple[Phase, ...]:
    """The recipe's phases: those named ("sparse,far"), with exact steps where given ("far=1411"). Raises SystemExit on an unknown name."""
    phases = TOY if toy else RECIPE
    known = {phase.name for phase in phases}
    exact = {name: int(count) for name, count in (part.split("=") for part in steps.split(","))} if steps else {}
    wanted = set(names.split(",")) if names else known
    if unknown := sorted((wanted | set(exact)) - known):
        raise SystemExit(f"no phase called {', '.join(unknown)}; there are {', '.join(phase.name for phase in phases)}")
    chosen = [phase for phase in phases if phase.name in wanted]
    return tuple(dataclasses.replace(phase, steps=exact.get(phase.name, phase.steps)) for phase in chosen)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.demo_training.train", description="Train the demo model on one device.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, log.txt and record.json")
    parser.add_argument("--corpus", type=Path, help="packed corpus; built there from this Python's own library if missing")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="folder whose tokenizer files are used and copied")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every phase's seconds")
    parser.add_argument("--phases", help="only these phases, e.g. sparse,far")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from")
    parser.add_argument("--steps", help="exact steps a phase, e.g. dense=3158,sparse=1202,far=1411, to repeat a recorded run")
    parser.add_argument("--toy", action="store_true", help="a few steps on tiny rows, to see that everything runs")
    parser.add_argument("--no-compile", action="store_true", help="run layers as they are")
    chosen = parser.parse_args(arguments)
    phases = phases_of(chosen.toy, chosen.phases, chosen.steps)
    path = chosen.corpus or chosen.out / "corpus.npz"
    if not path.exists():
        corpora.save(corpora.build(Tokenizer.from_file(str(chosen.tokenizer / "tokenizer.json"))), path)
    torch.set_float32_matmul_precision("high")  # the scores' products: exact on bfloat16 inputs, twice as fast
    compiled = torch.cuda.is_available() and not chosen.no_compile
    run = Run(corpora.load(path), chosen.tokenizer, phases, Shape(), chosen.seed, chosen.scale, chosen.start, compiled)
    train(run, chosen.out)


if __name__ == "__main__":
    main()
