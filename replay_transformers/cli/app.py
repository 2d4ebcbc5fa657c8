"""The commands and their options."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

import torch
import transformers
import typer

import replay_transformers as rt
from replay_transformers.cli.check import Question, check_model
from replay_transformers.cli.compare import Settings
from replay_transformers.cli.loading import Loaded, load, looks_local, replay_config
from replay_transformers.cli.screen import Screen
from replay_transformers.cli.speculation import SpeculationSettings
from replay_transformers.config import ReplayConfig
from replay_transformers.kernels.formats import CHECKPOINTS, READOUTS
from replay_transformers.samples import SAMPLE_MODELS, sample_model

__all__ = ["app", "main"]

# Openings of the kind of text that the sample models are trained on; --seed picks one.
PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n        ',
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
)
SHORT_PROMPT = "def add(a, b):\n    return a"
DEMO_ROUNDS, SPECULATION_ROUNDS = 3, 2
SPECULATION_ROWS, DRAFTS = 4, 4
MOST_GIB = 2.0**20  # more than any device has

app = typer.Typer(name="replay-transformers", no_args_is_help=True, add_completion=False)


class SampleName(str, Enum):
    """The sample models that the demonstration runs."""

    qwen3_5 = "qwen3_5"
    nemotron_h = "nemotron_h"


class CacheName(str, Enum):
    """The replay caches."""

    replay = "replay"
    replay_static = "replay_static"


class DraftLengthName(str, Enum):
    """How long drafts are."""

    fixed = "fixed"
    adaptive = "adaptive"


class DtypeName(str, Enum):
    """Dtypes of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
Window = Annotated[int, typer.Option(min=1, help="Decode steps between two writes of the state.")]
Checkpoint = Annotated[str, typer.Option(help=f"Precision of the state: {', '.join(CHECKPOINTS)}.")]
Readout = Annotated[
    str | None, typer.Option(help=f"Precision of a separate copy that steps read, if any: {', '.join(READOUTS)}.")
]
DecaySkip = Annotated[float, typer.Option(help="Heads that scale their state by less do not read it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not stream the text.")]
OnlyJson = Annotated[bool, typer.Option("--json", help="Print nothing but the results, as JSON.")]


def main() -> None:
    """The console command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replay-transformers {rt.__version__} (transformers {transformers.__version__})")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Decode hybrid state-space models with a cache that keeps recent inputs instead of rewriting the state."""
    verbosity = transformers.logging.get_verbosity()
    context.call_on_close(lambda: transformers.logging.set_verbosity(verbosity))
    transformers.logging.set_verbosity_error()  # not the advice to install faster stock kernels


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small models gain nothing from more threads, and lose much where something else uses the cores as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@app.command()
def demo(
    model: Annotated[SampleName | None, typer.Option(help="Only this sample model.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; by default a built-in one.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    window: Window = 16,
    seed: Annotated[int, typer.Option(min=0, help="Which built-in prompt. Decoding itself is greedy.")] = 0,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Compare drafters with plain decoding instead, for one prompt and four.")
    ] = False,
    drafts: Annotated[
        int | None, typer.Option(min=1, help="With --speculate: tokens of the longest draft, by default 4.")
    ] = None,
    draft_length: Annotated[
        DraftLengthName | None,
        typer.Option(help="With --speculate: always the longest draft (the default), or as many tokens as pay."),
    ] = None,
    quiet: Quiet = False,
    only_json: OnlyJson = False,
) -> None:
    """Continue a prompt with the stock cache and with a replay cache, and compare tokens, bytes and time.

    Runs the small models that ship with the package, in float32 on one CPU thread. Exits with 1 if the tokens differ.
    With --speculate: a replay cache without and with drafters (prompt lookup, an assistant, the model's MTP head).
    """
    if not speculate and (drafts, draft_length) != (None, None):
        raise typer.BadParameter("--drafts and --draft-length are for --speculate: add it, or leave them out")
    text = PROMPTS[seed % len(PROMPTS)] if prompt is None else prompt
    settings = Settings(max_new_tokens=max_new_tokens, window=window, rounds=DEMO_ROUNDS)
    length = draft_length or DraftLengthName.fixed
    drafting = SpeculationSettings(
        max_new_tokens, window, drafts=drafts or DRAFTS, length=length.value, rounds=SPECULATION_ROUNDS
    )
    screen = Screen(quiet=quiet, only_json=only_json)
    with screen.errors(), _one_thread():
        for sample in [model] if model else SampleName:
            loaded = _load_sample(screen, sample.value)
            if not speculate:
                screen.compare(loaded, text, settings)
                continue
            assistant = _load_sample(screen, f"{sample.value}_draft").model
            batch = [text, *(other for other in (*PROMPTS, SHORT_PROMPT) if other != text)][:SPECULATION_ROWS]
            for prompts in ([text], batch):
                screen.speculate(loaded, assistant, prompts, drafting)
    screen.finish()


def _load_sample(screen: Screen, name: str) -> Loaded:
    folder = rt.sample_model(name)
    with screen.loading(folder):
        return load(folder, "float32", "cpu")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder, a sample model's name, or a name on the Hugging Face hub.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: MaxNewTokens = 64,
    window: Window = 16,
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the weights.")] = DtypeName.float32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU if there is one.")] = None,
    cache: Annotated[CacheName, typer.Option(help="Growing or fixed shapes.")] = CacheName.replay,
    checkpoint: Checkpoint = ReplayConfig.checkpoint,
    readout: Readout = ReplayConfig.readout,
    decay_skip: DecaySkip = ReplayConfig.decay_skip,
    compare: Annotated[bool, typer.Option(help="Run the stock cache as well.")] = True,
    quiet: Quiet = False,
    only_json: OnlyJson = False,
) -> None:
    """Continue a prompt with the stock cache and a replay cache on any supported model; compare tokens, bytes and time.

    Exits with 1 if the tokens differ in float32 (of the state as well), and with 2 if the model cannot be used.
    """
    asked = {"checkpoint": checkpoint, "readout": readout, "decay_skip": decay_skip}
    precision = {name: value for name, value in asked.items() if value != getattr(ReplayConfig, name)}
    settings = Settings(max_new_tokens, window, cache=cache.value, stock=compare, precision=precision)
    screen = Screen(quiet=quiet, only_json=only_json)
    source = sample_model(model) if model in SAMPLE_MODELS and not looks_local(model) else model
    with screen.errors():
        replay_config({"window": window, **precision})
        with screen.loading(source):
            loaded = load(source, dtype.value, device)
        screen.compare(loaded, prompt, settings)
    screen.finish()


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A folder, a sample model's name, or a name on the Hugging Face hub.")],
    checkpoint: Checkpoint = ReplayConfig.checkpoint,
    readout: Readout = ReplayConfig.readout,
    window: Window = 16,
    max_draft: Annotated[
        int,
        typer.Option(min=0, help="Last tokens that can be rejected: with a drafter, what it proposes at most."),
    ] = 0,
    decay_skip: DecaySkip = ReplayConfig.decay_skip,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence that attention holds.")] = 2048,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt among them, fed in one forward.")] = 512,
    dtype: Annotated[DtypeName | None, typer.Option(help="Of weights and activations; by default the model's.")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, ...; by default one device, a GPU if there is one.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0, max=MOST_GIB, help="GiB of each device; by default what is free on the GPU.")
    ] = None,
    only_json: OnlyJson = False,
) -> None:
    """Say what a replay cache would do with a model, layer by layer, and which batch fits, without its weights.

    Reads the configuration alone. Exits with 1 if the model is refused, and with 2 if the question makes no sense.
    """
    settings = {"checkpoint": checkpoint, "readout": readout, "window": window, "max_draft": max_draft}
    question = Question(
        source=sample_model(model) if model in SAMPLE_MODELS and not looks_local(model) else model,
        settings={**settings, "decay_skip": decay_skip},
        length=length,
        prompt=prompt,
        dtype=None if dtype is None else dtype.value,
        device_map=device_map,
        memory=None if memory is None else int(memory * 2**30),
    )
    screen = Screen(only_json=only_json)
    with screen.errors():
        with screen.loading(question.source):
            found = check_model(question)
        screen.show_check(found)
