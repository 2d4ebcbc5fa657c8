"""Continue many prompts, on one device or on several at once; a run that breaks off is resumed by the same command.

    accelerate launch --num_processes 4 scripts/generate_distributed.py \\
        --model qwen3_5 --prompts in.jsonl --output out.jsonl

Every process has a copy of the model. Batches are formed from the prompts alone, by length, the longest first, and then
dealt out to the processes; each appends to a file of its own, and the first merges them in the prompts' order. Results
depend neither on the number of processes nor on where a run broke off: batches that are not complete are generated
again as a whole, since other companions would round differently, and only lines that are missing are written.
Sampling has random numbers of its own for every prompt and step.

With fixed shapes (replay_static, static) prompts are padded to a multiple of 64 tokens and the last batch is filled up,
so that few graphs are compiled or recorded. On a CPU start several processes with `torchrun --standalone
--nproc-per-node 4`; accelerate launch --cpu starts one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from distributed_generation.generation import Engine
from distributed_generation.parts import Parts, Writer, encoded
from distributed_generation.processes import chosen_device, joined
from distributed_generation.prompts import Batch, Prompt, digest, encode, form_batches, read_prompts
from distributed_generation.settings import CACHES, FIXED_MULTIPLE, Settings, differences
from rich.console import Console
from rich.markup import escape

import replay_transformers as rt
from replay_transformers.cli.loading import DTYPES, CommandError, load
from replay_transformers.geometry import text_config

REPORT_SECONDS = 10.0

console = Console(soft_wrap=True, highlight=False)


def main(
    model: Annotated[str, typer.Option(help="A folder, a sample model's name, or a name on the hub.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines if its name ends in .jsonl, else a prompt per line.")],
    output: Annotated[Path, typer.Option(help="JSON lines, one per prompt, in the prompts' order.")],
    field: Annotated[
        str, typer.Option(help="Where a line of JSON has its prompt; it may have an id in 'id'.")
    ] = "prompt",
    limit: Annotated[int | None, typer.Option(help="Only so many prompts, from the first on.", min=1)] = None,
    redo: Annotated[bool, typer.Option("--redo", help="Start anew, and replace what is there.")] = False,
    dtype: Annotated[str, typer.Option(help=f"Of the weights, out of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str | None, typer.Option(help="By default accelerate's choice for each process.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts that are generated together.", min=1)] = 8,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens per completion, if no end token comes before.", min=1)
    ] = 64,
    cache: Annotated[str, typer.Option(help=f"One of {', '.join(CACHES)}.")] = "replay",
    window: Annotated[int | None, typer.Option(help="Decode steps between two writes of the state.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Precision of the replay cache's state.")] = None,
    readout: Annotated[str | None, typer.Option(help="Precision of a separate copy that steps read.")] = None,
    decay_skip: Annotated[
        float | None, typer.Option(help="Heads that scale their state by less do not read it.")
    ] = None,
    prompt_lookup: Annotated[
        int | None, typer.Option(help="Draft so many tokens from what the text said before.", min=1)
    ] = None,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Draw tokens instead of taking the likeliest.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="With --do-sample; the model's own setting is not used.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --do-sample, as is top_k.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of stochastic rounding.", min=0, max=2**32 - 1)] = 0,
    num_return_sequences: Annotated[int, typer.Option(help="Completions per prompt, with --do-sample.", min=1)] = 1,
    pad_multiple: Annotated[
        int | None,
        typer.Option(help=f"Pad to a multiple of this; by default {FIXED_MULTIPLE} with fixed shapes.", min=1),
    ] = None,
    threads: Annotated[int, typer.Option(help="Of each process on a CPU; other numbers round differently.", min=1)] = 1,
) -> None:
    """Continue many prompts, on one device or on several at once; a run that breaks off is resumed by the same command.

    For several devices put `accelerate launch --num_processes N` before this script; on a CPU `torchrun --standalone
    --nproc-per-node N`.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    state = joined(device)
    try:
        settings = Settings(
            model=model, dtype=dtype, batch=batch, max_new_tokens=max_new_tokens, cache=cache, window=window,
            checkpoint=checkpoint, readout=readout, decay_skip=decay_skip, prompt_lookup=prompt_lookup,
            do_sample=do_sample, temperature=temperature, top_p=top_p, seed=seed, pad_multiple=pad_multiple,
            num_return_sequences=num_return_sequences, threads=threads,
        )  # fmt: skip
        run = Run(state, settings, chosen_device(state, device), Parts(output))
        run.work(lambda: read_prompts(prompts, field, limit), redo)
        state.destroy_process_group()
    except CommandError as error:
        # what every process finds is said once; what one may find alone, memory for one, says which
        is_own = isinstance(error, OwnError)
        if state.is_main_process or is_own:
            who = f"process {state.process_index}: " if is_own and state.num_processes > 1 else ""
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error:[/red] {escape(who + str(error))}")
        raise typer.Exit(1) from error


class OwnError(CommandError):
    """What a process finds that the others may not."""


class Run:
    """One process of a run.

    Args:
        state: accelerate's.
        settings: what to do.
        device: of this process.
        parts: the files.
    """

    def __init__(self, state: PartialState, settings: Settings, device: str, parts: Parts) -> None:
        self.state, self.settings, self.device, self.parts = state, settings, device, parts
        self.kind = device.partition(":")[0]
        self.reported = time.monotonic()

    def work(self, read: Callable[[], list[Prompt]], redo: bool) -> None:
        """Generate what is missing, and merge; ``read`` reads the prompts."""
        if self.kind == "cpu":
            torch.set_num_threads(self.settings.threads)
        theirs, is_finished, done = self.agree(read, redo)
        if is_finished:
            self.say(f"{self.parts.output} is finished already; --redo generates it anew")
            return
        try:
            self.take_part(self.check(read(), theirs), done)
        except (CommandError, torch.OutOfMemoryError) as error:
            raise OwnError(str(error)) from error

    def take_part(self, prompts: list[Prompt], done: set[int]) -> None:
        """What a process does once all agree on what is to be done."""
        loaded = load(self.settings.source, self.settings.dtype, self.device)
        positions = getattr(text_config(loaded.model.config), "max_position_embeddings", None)
        prompts = encode(prompts, loaded.tokenizer, positions, self.settings.max_new_tokens)
        batches = form_batches(prompts, self.settings.batch, self.settings.multiple)
        missing = [batch for batch in batches if not done.issuperset(batch.indices)]
        count = self.state.num_processes
        self.say(
            f"{len(prompts)} prompts, batches to do: {len(missing)} of {len(batches)}; {count} "
            f"process{'es' if count > 1 else ''} on {self.kind}. If this breaks off, run it again"
        )
        self.generate(Engine(loaded, self.settings, prompts), missing, done)
        self.state.wait_for_everyone()
        if self.state.is_main_process:
            self.finish(prompts)
        self.state.wait_for_everyone()

    def agree(self, read: Callable[[], list[Prompt]], redo: bool) -> tuple[dict[str, Any], bool, set[int]]:
        """The first process looks at the files, the others hear of it.

        Returns:
            The fingerprint, whether the output is finished, and the prompts that are done.

        Raises:
            CommandError: what is there belongs to another run, or is not to be read.
        """
        answer: list[Any] = [None]
        if self.state.is_main_process:
            try:
                fingerprint = self.settings.fingerprint(digest(read()), self.kind)
                answer = [(fingerprint, *self.look(fingerprint, redo))]
            except (CommandError, OSError) as error:
                answer = [str(error)]
        if self.state.num_processes > 1:
            answer = broadcast_object_list(answer)
        if isinstance(answer[0], str):
            raise CommandError(answer[0])
        return answer[0]

    def check(self, prompts: list[Prompt], theirs: dict[str, Any]) -> list[Prompt]:
        """The prompts, once it is sure that this process sees what the first one sees."""
        differing = differences(theirs, self.settings.fingerprint(digest(prompts), self.kind))
        if differing:
            raise CommandError(f"this process differs from the first one: {'; '.join(differing)}")
        if not self.parts.header.exists():
            raise CommandError(f"{self.parts.folder} is not there: --output must be where all processes see it")
        self.parts.lock()
        return prompts

    def look(self, fingerprint: dict[str, Any], redo: bool) -> tuple[bool, set[int]]:
        """Check and repair what is there."""
        self.parts.lock(alone=True)
        surroundings = {"torch": torch.__version__, "transformers": transformers.__version__, "package": rt.__version__}
        if self.kind == "cuda" and torch.cuda.is_available():
            surroundings["gpu"] = torch.cuda.get_device_name(self.device)
        is_finished, differing = self.parts.begin(fingerprint, surroundings, redo)
        if is_finished:
            self.parts.finish()
            return True, set()
        if differing:
            self.say(f"resumed elsewhere, where results may differ by rounding: {'; '.join(differing)}")
        self.parts.repair()
        done = set(self.parts.done())
        self.parts.lock()  # no longer alone
        return False, done

    def generate(self, engine: Engine, missing: list[Batch], done: set[int]) -> None:
        """Generate this process's share of the batches that are not complete."""
        total = sum(not prompt.error for prompt in engine.prompts)
        writer = Writer(self.parts.part(self.state.process_index))
        for batch in missing[self.state.process_index :: self.state.num_processes]:
            for line in engine.run(batch):
                if line["index"] not in done:
                    writer.write(encoded(line))
            if self.state.is_main_process:
                self.report(total)

    def report(self, total: int) -> None:
        """Say how far all processes are, now and then."""
        count = self.parts.count()
        if time.monotonic() - self.reported > REPORT_SECONDS or count == total:
            self.reported = time.monotonic()
            self.say(f"{count} of {total} prompts done")

    def finish(self, prompts: list[Prompt]) -> None:
        """Merge, and say what there is."""
        errors = {p.index: encoded(p.head | {"error": p.error}) for p in prompts if p.error}
        self.parts.merge(len(prompts), errors)
        note = f", {len(errors)} of them with an error instead of a completion" if errors else ""
        self.say(f"written to {self.parts.output}: {len(prompts)} lines{note}")

    def say(self, text: str) -> None:
        """Print, on the first process."""
        if self.state.is_main_process:
            console.print(escape(text))


if __name__ == "__main__":
    typer.run(main)
