"""Train the four small models in replay_transformers/models on the Python source that ships with CPython.

On a GPU all of them train side by side in a few minutes; a CPU needs days, or --steps 3 to see it run. With --heads
the models stay as they are, and only the heads for multi-token prediction beside them are trained: a quarter of an hour
on a CPU with --only nemotron_h --steps 900 --batch 8 --length 512.
"""

import hashlib
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file, save_file
from sample_training.corpus import held_out_files, read_source, standard_library, training_files
from sample_training.measure import HeldOut, measure
from sample_training.models import SAMPLE_MODELS, SampleModel, build_head, build_model
from sample_training.tokenizer import RECIPES, token_stream, train_tokenizer
from sample_training.trainer import Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
# The steps over which the time of a step is taken when --minutes bounds the schedule; all lie in the warm-up.
TIMED_STEPS = (20, 60)
PROMPT = "def "
HEAD_SETTINGS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_layers_block_type")

console = Console()


def main(
    output: Annotated[Path, typer.Option(help="Folder that receives one folder per model.")] = ROOT
    / "replay_transformers"
    / "models",
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of Python files; by default this interpreter's standard library.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Train only this model: {', '.join(SAMPLE_MODELS)}.")] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 2222,
    minutes: Annotated[float | None, typer.Option(help="Shorten the schedule to about this long.")] = None,
    batch: Annotated[int, typer.Option(help="Windows in a step.", min=1)] = 32,
    length: Annotated[int, typer.Option(help="Tokens in a window.", min=16)] = 1024,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="Seeds weights, file order and windows.")] = 0,
    heads: Annotated[
        bool, typer.Option("--heads", help="Train only the MTP heads of the models that are there.")
    ] = False,
) -> None:
    """Train the sample models, save them, and print their figures on held-out files."""
    samples = [sample for sample in chosen_samples(only) if sample.has_mtp or not heads]
    root = corpus or standard_library()
    torch.set_float32_matmul_precision("high")
    texts = [text for text in map(read_source, training_files(root)) if text]
    held_out = [read_source(path) for path in held_out_files(root)]
    console.print(f"{len(texts)} files, {sum(map(len, texts)):,} characters; {len(held_out)} files held out")

    tokenizers, trainers = {}, {}
    for family in dict.fromkeys(sample.family for sample in samples):
        one = next(output / sample.name for sample in samples if sample.family == family)
        tokenizer = tokenizers[family] = (
            AutoTokenizer.from_pretrained(one) if heads else train_tokenizer(RECIPES[family], texts)
        )
        tokens = token_stream(tokenizer, texts, seed)
        console.print(f"{family}: {len(tokenizer)} tokens in the vocabulary, {len(tokens):,} in all files")
        for sample in samples:
            if sample.family == family:
                torch.manual_seed(seed)
                model = trained_model(sample, output / sample.name) if heads else build_model(sample.config())
                trainers[sample.name] = Trainer(
                    model,
                    build_head(model) if sample.has_mtp else None,
                    tokens,
                    batch=batch,
                    length=length,
                    rate=sample.rate,
                    steps=steps,
                    seed=seed,
                    device=device,
                    only_head=heads,
                )
    seconds = train(trainers, minutes)
    run = {
        "batch": batch,
        "length": length,
        "seed": seed,
        "seconds_of_all_models": round(seconds),
        "corpus": corpus_record(corpus, texts),
        **environment(device),
    }
    table = Table("model", "MB", "nats per character", "MTP acceptance")
    for sample in samples:
        save(output / sample.name, trainers[sample.name], None if heads else tokenizers[sample.family])
    for sample in samples:
        folder, trainer = output / sample.name, trainers[sample.name]
        earlier = json.loads((folder / "training.json").read_text()) if heads else {"length": length}
        figures = measure_folder(sample, folder, held_out, earlier["length"], device)
        record = {**figures.record(), **trainer.record(), **run}
        if heads:
            record = {**earlier, **figures.record(), "mtp_head": {**trainer.record(), **run}}
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        size = (folder / "model.safetensors").stat().st_size
        acceptance = f"{figures.mtp_acceptance:.3f}" if figures.mtp_acceptance is not None else ""
        table.add_row(sample.name, f"{size / 1e6:.2f}", f"{figures.nats_per_character:.4f}", acceptance)
        console.print(f"{sample.name}, greedy: {PROMPT + greedy(folder, device)!r}", markup=False, highlight=False)
    console.print(table)


def chosen_samples(only: list[str] | None) -> list[SampleModel]:
    """The models to train; raises ValueError for a name that does not exist."""
    unknown = set(only or ()) - set(SAMPLE_MODELS)
    if unknown:
        raise ValueError(f"--only got {', '.join(sorted(unknown))}, expected any of {', '.join(SAMPLE_MODELS)}")
    return [sample for name, sample in SAMPLE_MODELS.items() if not only or name in only]


def train(trainers: dict[str, Trainer], minutes: float | None) -> float:
    """Advance all models in turn, one step each, and return the seconds that took.

    On a GPU every model has a stream of its own, so the steps of one turn overlap.
    """
    first = next(iter(trainers.values()))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    start = timed_from = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=first.steps)
        while first.done < first.steps:
            for trainer in trainers.values():
                trainer.step()
            if first.done % 20 == 0 or first.done == first.steps:
                losses = "  ".join(f"{name} {trainer.loss.item():.3f}" for name, trainer in trainers.items())
                progress.update(task, completed=first.done, description=losses)
                if first.done % 500 == 0 or first.done == TIMED_STEPS[1]:
                    progress.console.print(f"step {first.done}, {time.perf_counter() - start:.0f} s: {losses}")
            if first.done == TIMED_STEPS[0]:
                timed_from = time.perf_counter()
            if first.done == TIMED_STEPS[1] and minutes is not None:
                per_step = (time.perf_counter() - timed_from) / (TIMED_STEPS[1] - TIMED_STEPS[0])
                for trainer in trainers.values():
                    trainer.steps = min(trainer.steps, first.done + int(60 * minutes / per_step))
                progress.update(task, total=first.steps)
                progress.console.print(f"{1e3 * per_step:.1f} ms a step for all models, {first.steps} steps")
    return time.perf_counter() - start


def save(folder: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write a model folder in bfloat16; the MTP head's tensors lie beside the model's, as in released checkpoints."""
    trainer.model.to(torch.bfloat16).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if trainer.mtp is not None:
        file = folder / "model.safetensors"
        head = {f"mtp.{name}": value.cpu() for name, value in trainer.mtp.to(torch.bfloat16).state_dict().items()}
        save_file({**load_file(file), **head}, file, metadata={"format": "pt"})


def trained_model(sample: SampleModel, folder: Path) -> PreTrainedModel:
    """A saved model in float32, whose configuration names the head that the sample is to have."""
    model = load_model(folder, "cpu", torch.float32)
    wanted = sample.config()
    for name in HEAD_SETTINGS:
        if hasattr(wanted, name):
            setattr(model.config, name, getattr(wanted, name))
    return model


def load_model(folder: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A saved folder's model on ``device``."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(torch.device(device))  # type: ignore[arg-type]


def measure_folder(sample: SampleModel, folder: Path, texts: list[str], length: int, device: str) -> HeldOut:
    """The figures of a saved folder: bfloat16 weights, float32 arithmetic."""
    model = load_model(folder, device, torch.float32)
    mtp = None
    if sample.has_mtp:
        mtp = build_head(model).to(device)
        tensors = load_file(folder / "model.safetensors", device=device)
        mtp.load_state_dict({name[4:]: value for name, value in tensors.items() if name.startswith("mtp.")})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return measure(model, mtp, tokenizer, texts, length)


def greedy(folder: Path, device: str) -> str:
    """What the saved model writes after ``PROMPT``."""
    model: Any = load_model(folder, device, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def corpus_record(corpus: Path | None, texts: list[str]) -> dict[str, Any]:
    """Names the training text: where it comes from, its size, and a digest of it."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    name = corpus.name if corpus is not None else f"cpython-{platform.python_version()}"
    return {
        "name": name,
        "files": len(texts),
        "characters": sum(map(len, texts)),
        "sha256": digest.hexdigest(),
        "license": "PSF-2.0",
    }


def environment(device: str) -> dict[str, Any]:
    """Versions, the device, and the commit of this checkout if it is one."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git.stdout.strip() or None,
    }


if __name__ == "__main__":
    typer.run(main)
