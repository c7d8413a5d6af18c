"""Pretrain a small Llama-style model on packed documents, with any recipe of FLAMIA's attention.

    python examples/pretrain_llama.py --attention mxfp8

Text is read from the files or folders of ``--data`` (default: the source code of Python's standard library), byte by
byte. A document is a passage between two or more blank lines; long ones are cut into pieces of 64 to 1024 bytes. Every
step trains on one pack of ``--tokens`` tokens: documents one after the other, each seeing only itself, their boundaries
in ``cu_seqlens``.

The model is plain PyTorch but for the one call of `flamia.attention`. On the CPU that is the NumPy reference, the
linear layers are float32, and 300 steps of the default model (1.2 million parameters) take some minutes. On CUDA the
linear layers run in bfloat16 under autocast, and attention needs a certified kernel (``flamia doctor``), except that
``--attention bf16`` is PyTorch's own ``varlen_attn`` there. ``--compile`` compiles the blocks.

Every run is kept in ``--out``: a checkpoint ``<attention>-<seed>.pt``, and a JSON file of its losses and speed. All of
them are drawn together in ``loss.png``. With ``--resume`` a run that was interrupted, or is given more ``--steps``,
goes on where its last checkpoint was, with the same bits. Initial weights depend on ``--seed``,
the order of the data on ``--data-seed``, so that runs are comparable step by step: two seeds of one recipe show how
much noise there is.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flamia

RECIPES = ("bf16", "mxfp8", "nvfp4_fp8", "cudnn_mxfp8")
BEGIN = 256  # token before each document; the other 256 are bytes
VOCABULARY = 257
SHORTEST, LONGEST = 64, 1024  # bytes of a document
SKIP = -100  # target that counts for nothing
UNTIMED = 10  # first steps, which compile and load kernels


# ---- data ---------------------------------------------------------------------------------------------------


def read_documents(paths: Sequence[Path]) -> list[bytes]:
    """Documents of all text files under ``paths``, in the order of their names."""
    files: list[Path] = []
    for path in paths:
        inside = [f for f in path.rglob("*.py") if "site-packages" not in f.relative_to(path).parts]
        files += sorted(inside) if path.is_dir() else [path]
    documents, lengths = [], np.random.default_rng(0)
    for file in files:
        passages = re.split(rb"\n(?:[ \t]*\n){2,}", file.read_bytes())
        for passage in passages:
            while len(passage) >= SHORTEST:
                length = int(lengths.integers(SHORTEST, LONGEST + 1))
                documents.append(passage[:length])
                passage = passage[length:]
    if not documents:
        raise SystemExit(f"no passage of {SHORTEST} bytes or more in {', '.join(map(str, paths))}")
    return documents


def pack(documents: list[bytes], tokens: int, generator: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random documents up to ``tokens`` tokens, the last one cut.

    :returns: tokens, targets and positions, int64 ``(tokens,)``, and int32 ``cu_seqlens``.
    """
    ids, targets = np.empty(tokens, np.int64), np.full(tokens, SKIP, np.int64)
    positions, boundaries = np.empty(tokens, np.int64), [0]
    while boundaries[-1] < tokens:
        text = np.frombuffer(documents[generator.integers(len(documents))], np.uint8)
        start, stop = boundaries[-1], min(boundaries[-1] + 1 + len(text), tokens)
        ids[start], ids[start + 1 : stop] = BEGIN, text[: stop - start - 1]
        targets[start : stop - 1] = ids[start + 1 : stop]
        positions[start:stop] = np.arange(stop - start)
        boundaries.append(stop)
    a, b, c = (torch.from_numpy(x) for x in (ids, targets, positions))
    return a, b, c, torch.tensor(boundaries, dtype=torch.int32)


# ---- model --------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q ``(T, Hq, D)``, k and v ``(T, Hkv, D)`` and ``cu_seqlens``."""


def choose_attention(recipe: str, device: str) -> Attend:
    """FLAMIA's attention; for bf16 on CUDA the baseline, PyTorch's."""
    longest = LONGEST + 1
    if recipe != "bf16" or torch.device(device).type != "cuda":
        return lambda q, k, v, cu_seqlens: flamia.attention(q, k, v, cu_seqlens, max_seqlen=longest, recipe=recipe)
    from torch.nn.attention.varlen import varlen_attn

    # the way to ask for causal attention has changed between releases
    window = "window_size" in inspect.signature(varlen_attn).parameters
    mask: dict[str, Any] = {"window_size": (-1, 0)} if window else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out: Tensor = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **mask)
        return out

    return attend


class Attention(nn.Module):
    """Causal attention within documents, with rotary positions and grouped KV heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.attend = heads, kv_heads, head_dim, attend
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k, v = (t.bfloat16() for t in (rotate(q, rotation), rotate(k, rotation), v))
        y = self.attend(q, k, v, cu_seqlens)
        return self.out(y.flatten(1).to(x.dtype))


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and beside a residual."""

    def __init__(self, width: int, hidden: int, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, **attention)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation, cu_seqlens)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """A decoder over packed documents; input and output embeddings are tied."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, attend: Attend) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.embedding = nn.Embedding(VOCABULARY, width)
        attention = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "attend": attend}
        hidden = 64 * math.ceil(width * 8 / 3 / 64)
        self.blocks = nn.ModuleList([Block(width, hidden, **attention) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        rotation = rotary(positions, self.head_dim)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rotation, cu_seqlens)
        return F.linear(self.norm(x), self.embedding.weight)


def rotary(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(T, 1, head_dim / 2)``."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angle = positions[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of the channels of ``x (T, H, D)`` against each other."""
    (cos, sin), (a, b) = rotation, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# ---- training -----------------------------------------------------------------------------------------------


class Run:
    """One training run and its checkpoint."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = options.out / f"{options.attention}-{options.seed}.pt"
        cuda = torch.device(options.device).type == "cuda"
        torch.manual_seed(options.seed)
        shape = {name: getattr(options, name) for name in ("layers", "width", "heads", "kv_heads", "head_dim")}
        self.model = Llama(**shape, attend=choose_attention(options.attention, options.device)).to(options.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda or None
        )
        if options.compile:
            for block in self.model.blocks:
                block.compile(fullgraph=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of the steps of this process
        self.held_out: list[tuple[int, float]] = []
        if options.resume and self.path.exists():
            self.load()

    def load(self) -> None:
        """Go on from the checkpoint."""
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.held_out = state["losses"], [(int(s), float(x)) for s, x in state["held_out"]]

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the previous one."""
        draft = self.path.with_suffix(".draft")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "losses": self.losses, "held_out": self.held_out}, draft)
        draft.replace(self.path)
        o = self.options
        record = {
            "device": torch.cuda.get_device_name(o.device) if torch.device(o.device).type == "cuda" else "CPU",
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "options": {name: value for name, value in vars(o).items() if isinstance(value, int | float | str)},
            "tokens_per_second": self.tokens_per_second(),
            "held_out": self.held_out,
            "losses": self.losses,
        }
        self.path.with_suffix(".json").write_text(json.dumps(record))

    def tokens_per_second(self) -> float:
        """By the median step, without the first ones."""
        return self.options.tokens / statistics.median(self.seconds[UNTIMED:] or self.seconds)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross entropy per predicted byte, in nats."""
        ids, targets, positions, cu_seqlens = (x.to(self.options.device) for x in batch)
        cuda = ids.device.type == "cuda"
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # the number of documents changes from step to step
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=cuda):
            logits = self.model(ids, positions, cu_seqlens)
        return F.cross_entropy(logits.float(), targets, ignore_index=SKIP)

    def step(self, documents: list[bytes]) -> float:
        """One optimizer step. Its data depend on the data seed and the number of the step alone."""
        o, number, start = self.options, len(self.losses), time.perf_counter()
        batch = pack(documents, o.tokens, np.random.default_rng([o.data_seed, number]))
        warm = min(1.0, (number + 1) / o.warmup)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, number / o.schedule))
        for group in self.optimizer.param_groups:
            group["lr"] = o.lr * warm * cosine
        loss = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]

    @torch.no_grad()
    def evaluate(self, documents: list[bytes]) -> float:
        """Mean loss on packs of held-out documents, the same for every run."""
        generator, packs = np.random.default_rng(12345), self.options.held_out
        losses = [self.loss(pack(documents, self.options.tokens, generator)).item() for _ in range(packs)]
        self.held_out.append((len(self.losses), sum(losses) / packs))
        return self.held_out[-1][1]


def train(options: argparse.Namespace) -> Run:
    """Train up to ``options.steps`` steps, with progress, checkpoints and evaluations."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    documents = read_documents(options.data)
    order = np.random.default_rng(0).permutation(len(documents))
    held_out = [documents[i] for i in order[: max(1, len(order) // 50)]]
    documents = [documents[i] for i in order[len(held_out) :]] or held_out
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    parameters, size = sum(p.numel() for p in run.model.parameters()), sum(map(len, documents))
    print(
        f"{parameters / 1e6:.2f}M parameters, {len(documents)} documents of {size / 1e6:.1f} MB, attention "
        f"{options.attention} on {options.device}, {options.tokens} tokens per step; {len(run.losses)} of "
        f"{options.steps} steps done"
    )
    text = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tokens/s")
    with Progress(TextColumn("step"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn()) as bars:
        bar = bars.add_task("", total=options.steps, completed=len(run.losses), loss=math.nan, speed=0.0)
        for number in range(len(run.losses) + 1, options.steps + 1):
            loss = run.step(documents)
            speed = options.tokens / run.seconds[-1]
            bars.update(bar, completed=number, loss=loss, speed=speed)
            if number % options.every == 0 or number == options.steps:
                bars.print(f"step {number}: held-out loss {run.evaluate(held_out):.4f} nats per byte")
                run.save()
    if run.seconds:
        print(f"{run.tokens_per_second():.0f} tokens/s (median step)")
    return run


# ---- figure -------------------------------------------------------------------------------------------------


def draw(folder: Path) -> Path:
    """Loss of every run in ``folder``, and its difference from the first bf16 run; returns the PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    runs = {name: run for name, run in found.items() if "losses" in run}  # other files may lie there too
    if not runs:
        raise SystemExit(f"no run in {folder}")
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained", height_ratios=(3, 2))
    base_name = next((name for name in runs if name.startswith("bf16-")), None)
    base = None if base_name is None else np.array(runs[base_name]["losses"])
    for (name, run), style in zip(runs.items(), line_styles(), strict=False):
        losses = np.array(run["losses"])
        smooth = running_mean(losses)
        top.plot(np.arange(1, len(smooth) + 1), smooth, label=f"{name}: {run['held_out'][-1][1]:.4f}", **style)
        if base is not None and name != base_name:
            shared = min(len(losses), len(base))
            gap = running_mean(losses[:shared] - base[:shared])
            bottom.plot(np.arange(1, shared + 1), gap, **style)
    top.set(ylabel="nats per byte", title="Training loss, mean of 20 steps")
    top.legend(fontsize=8, title="recipe-seed: held out at the end", title_fontsize=8)
    bottom.set(xlabel="step", ylabel=f"difference from {base_name}")
    bottom.axhline(0, color="0.6", linewidth=0.8)
    path = folder / "loss.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def running_mean(x: np.ndarray[Any, Any], width: int = 20) -> np.ndarray[Any, Any]:
    """Mean of the last ``width`` values, of fewer at the beginning."""
    total = np.cumsum(np.concatenate([[0.0], x]))
    stop = np.arange(1, len(x) + 1)
    start = np.maximum(stop - width, 0)
    mean: np.ndarray[Any, Any] = (total[stop] - total[start]) / (stop - start)
    return mean


def line_styles() -> Iterator[dict[str, Any]]:
    """Distinct also without colours, and where curves lie upon one another."""
    dashes = ("-", "--", ":", "-.")
    for i in range(12):
        yield {"color": f"C{i % 4}", "linestyle": dashes[(i + i // 4) % 4], "linewidth": 1.3}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    standard_library = Path(sysconfig.get_path("stdlib"))
    add("--attention", choices=RECIPES, default="mxfp8", help="recipe of attention (default: %(default)s)")
    add("--data", type=Path, nargs="+", default=[standard_library], help="text files, or folders of .py files")
    add("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    add("--schedule", type=int, default=300, help="steps until the learning rate is at a tenth (default: %(default)s)")
    add("--tokens", type=int, default=1024, help="tokens per step (default: %(default)s)")
    add("--layers", type=int, default=3, help="(default: %(default)s)")
    add("--width", type=int, default=192, help="(default: %(default)s)")
    add("--heads", type=int, default=3, help="query heads (default: %(default)s)")
    add("--kv-heads", type=int, default=1, help="(default: %(default)s)")
    add("--head-dim", type=int, default=64, help="(default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="largest learning rate (default: %(default)s)")
    add("--warmup", type=int, default=20, help="steps of warm-up (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    add("--data-seed", type=int, default=0, help="of the order of the data (default: %(default)s)")
    add("--every", type=int, default=50, help="steps between checkpoints and evaluations (default: %(default)s)")
    add("--held-out", type=int, default=8, help="packs of an evaluation (default: %(default)s)")
    add("--out", type=Path, default=Path("pretrain"), help="folder for runs and loss.png (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    add("--compile", action="store_true", help="compile the blocks with torch.compile")
    add("--draw", action="store_true", help="train nothing, only draw the runs of --out")
    add("--resume", action="store_true", help="go on from the checkpoint of this attention and seed, if there is one")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"argument --device: PyTorch finds no CUDA device, got {options.device}")
    if options.kv_heads < 1 or options.heads % options.kv_heads:
        parser.error(f"argument --kv-heads: must divide the {options.heads} query heads, got {options.kv_heads}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then draw every run of the folder."""
    options = parse(arguments)
    if not options.draw:
        train(options)
    print(f"written: {draw(options.out)}")


if __name__ == "__main__":
    sys.exit(main())
