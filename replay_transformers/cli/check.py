"""What a replay cache would do with a model, from its configuration alone: nothing of the weights is loaded."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import replay_transformers as rt
from replay_transformers.cli.check_memory import (
    Load,
    Peak,
    layer_footprints,
    meta_cache,
    predict_peak,
    uses_library,
    weight_bytes,
)
from replay_transformers.cli.check_places import Places, largest_batch, place_model
from replay_transformers.cli.loading import DTYPES, CommandError, check_source, first_line, replay_config
from replay_transformers.config import MOST_RECORDS
from replay_transformers.cursor import WRITE_THROUGH_BYTES
from replay_transformers.geometry import STATE_SPACE, LayerGeometry, text_config
from replay_transformers.implementation import LIBRARIES, OLDEST_TRITON, installed_triton
from replay_transformers.patches.drafts import check_drafter
from replay_transformers.patches.mtp import mtp_layers

__all__ = ["NOTE", "NO_GAIN", "REFUSED", "Check", "Finding", "Question", "check_model"]

REFUSED, NO_GAIN, NOTE = "refused", "no gain", "note"
GIB = 2**30
WEIGHTS = (*DTYPES.values(), torch.float64)  # what `from_config` makes models in


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        source: a folder or a name on the hub.
        settings: fields of `ReplayConfig`.
        length: tokens that attention holds. prompt: tokens of the prompt.
        dtype: a key of `DTYPES`, or None for the configuration's own.
        device_map: "auto", a device, or None for a GPU if there is one.
        memory: bytes of each device, or None for what is free on a GPU.
    """

    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    length: int = 2048
    prompt: int = 512
    dtype: str | None = None
    device_map: str | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Finding:
    """Something to know; ``level`` is "refused", "no gain" or "note"."""

    level: str
    text: str


@dataclass
class Check:
    """What was found. Of a model that is refused, the cache and all that follows from it are empty."""

    question: Question
    model_class: str
    dtype: torch.dtype
    weights: int
    findings: list[Finding]
    geometries: list[LayerGeometry] = field(default_factory=list)
    footprints: list[dict[str, int]] = field(default_factory=list)
    places: Places | None = None
    batch: int | None = None
    peak: Peak | None = None

    @property
    def is_refused(self) -> bool:
        """Whether `generate` would raise."""
        return any(finding.level == REFUSED for finding in self.findings)

    def implementation(self, index: int) -> str | None:
        """What runs the steps of a layer, "triton" or "reference"; None where there is no state-space layer."""
        if self.geometries[index].kind not in STATE_SPACE or self.places is None:
            return None
        runs_on = self.places.running if index in self.places.offloaded else [self.places.of_layer[index]]
        on_gpu = any(name.startswith("cuda") for name in runs_on)
        return "triton" if on_gpu and self.has_kernels else "reference"

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether a GPU would run the Triton kernels with these settings and what is installed here."""
        return not any(_without_kernels(rt.ReplayConfig(**self.question.settings)))

    @property
    def per_sequence(self) -> dict[str, int]:
        """Bytes of one sequence in the cache by kind, over all layers."""
        kinds = self.footprints[0] if self.footprints else {}
        return {kind: sum(layer[kind] for layer in self.footprints) for kind in kinds}


def check_model(question: Question) -> Check:
    """Find out.

    Raises:
        CommandError: a configuration that cannot be read, or settings out of range.
    """
    if question.prompt > question.length:
        raise CommandError(
            f"a prompt of --prompt {question.prompt} tokens does not fit into --length {question.length}: make the one "
            "shorter or the other longer"
        )
    config = replay_config(question.settings)
    model = _meta_model(question)
    dtype = model.dtype
    found = Check(question, type(model).__name__, dtype, weight_bytes(model), list(_version_findings()))
    if tied := _tied_bytes(model):
        found.findings.append(Finding(NOTE, f"embedding and output matrix are one: {tied / GIB:.2f} GiB, counted once"))
    found.findings += _quantisation_findings(model.config, dtype)
    load = Load(config, question.length, question.prompt, dtype)
    try:
        cache = meta_cache(model.config, load)
    except (NotImplementedError, ValueError, AttributeError) as error:
        found.findings.append(Finding(REFUSED, first_line(error)))
        return found
    load = Load(config, question.length, question.prompt, dtype, library=uses_library(cache, dtype))
    found.geometries, found.footprints = cache.geometries, layer_footprints(cache)
    found.places = place_model(model, question.device_map, question.memory)
    found.findings += _speed_findings(cache, load, found.places)
    found.findings += _drafter_findings(model, config)
    if not found.is_refused:
        _predict(found, model, load)
    return found


def _predict(found: Check, model: Any, load: Load) -> None:
    assert found.places is not None
    peak = functools.cache(functools.partial(predict_peak, model, load))
    try:
        found.batch = largest_batch(found.places, found.footprints, peak)
        found.peak = peak(max(1, found.batch or 1))
        if found.batch == 0:
            found.findings.append(Finding(NOTE, "the memory does not hold the model and a single sequence"))
    except (NotImplementedError, RuntimeError) as error:
        why = f"activations cannot be predicted, an operation needs values: {first_line(error)}"
        found.findings.append(Finding(NOTE, why))
    if any(place.memory is None for place in found.places.running.values()):
        where = ", ".join(found.places.running)
        found.findings.append(Finding(NOTE, f"the memory of {where} is not known: --memory says which batch fits"))


def _meta_model(question: Question) -> Any:
    """The model without weights, in eval mode."""
    source = question.source
    check_source(source)
    try:
        config: Any = AutoConfig.from_pretrained(source)
        dtype = DTYPES[question.dtype] if question.dtype else _own_dtype(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except CommandError:
        raise
    except Exception as error:  # values that nobody has looked at fail anywhere in a model's own code
        raise CommandError(f"cannot read the configuration of {source!r}: {first_line(error)}") from error


def _own_dtype(config: Any) -> torch.dtype:
    """As `from_pretrained` takes it: what the configuration says, else float32.

    Raises:
        CommandError: nothing that a model computes in.
    """
    said = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None) or torch.float32
    found = getattr(torch, said, None) if isinstance(said, str) else said
    if found not in WEIGHTS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHTS)
        raise CommandError(
            f"the configuration has dtype {str(said).removeprefix('torch.')!r}, expected one of {names}: --dtype "
            "chooses another"
        )
    return found


def _tied_bytes(model: Any) -> int:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    return weight_bytes(output) if output is not None and output.weight is embedding.weight else 0


def _quantisation_findings(config: Any, dtype: torch.dtype) -> Iterator[Finding]:
    said = getattr(config, "quantization_config", None) or getattr(text_config(config), "quantization_config", None)
    if not said:
        return
    values = said if isinstance(said, dict) else said.to_dict()
    method = f" ({values['quant_method']})" if values.get("quant_method") else ""
    yield Finding(
        NOTE,
        f"quantization_config{method} is left out of account: weights are counted unquantised, {dtype.itemsize} bytes "
        f"each in {str(dtype).removeprefix('torch.')}",
    )


def _version_findings() -> Iterator[Finding]:
    if rt.is_enabled():
        return
    try:
        with rt.enable():
            pass
    except NotImplementedError as error:
        yield Finding(REFUSED, str(error))


def _speed_findings(cache: rt.ReplayCache, load: Load, places: Places) -> Iterator[Finding]:
    config = load.config
    if config.window == 1:
        yield Finding(NO_GAIN, "window 1 writes the state at every step, like the stock cache")
    if places.offloaded:
        where = sorted({places.of_layer[index] for index in places.offloaded})
        yield Finding(
            NO_GAIN,
            f"the weights of {len(places.offloaded)} layers are kept on {' and '.join(where)} and brought over at "
            "every step, which takes longer than the state",
        )
    if any(not name.startswith("cuda") for name in places.running):
        yield Finding(NO_GAIN, "off a GPU plain PyTorch runs: the results are right, and there is no gain in time")
        return
    for reason in _without_kernels(config):
        yield Finding(NO_GAIN, reason)
    if rows := WRITE_THROUGH_BYTES // cache.cursor.state_bytes if config.is_plain else 0:
        yield Finding(
            NOTE, f"batches of up to {rows} rows keep no records unless they speculate: their states are small enough"
        )
    if not load.library:
        names = sorted({LIBRARIES[layer.geometry.kind] for layer in cache.replay_layers})
        yield Finding(
            NOTE,
            f"prompts are scanned by plain PyTorch, slow where they are long: {' and '.join(names)} is not installed "
            f"here, or not for {str(load.dtype).removeprefix('torch.')}",
        )


def _without_kernels(config: rt.ReplayConfig) -> Iterator[str]:
    """Why plain PyTorch would run on a GPU."""
    version = installed_triton()
    if version is None:
        yield "Triton is not installed: plain PyTorch would run, without a gain"
    elif version < OLDEST_TRITON:
        yield f"Triton {version} is too old, plain PyTorch would run: {OLDEST_TRITON} is needed"
    if config.checkpoint == "float64":
        yield "there are no kernels for a state in float64: plain PyTorch would run"
    if config.capacity > MOST_RECORDS:
        yield (
            f"rings of {config.capacity} records are longer than the kernels take ({MOST_RECORDS}): plain PyTorch "
            "would run; choose a smaller window or max_draft"
        )


def _drafter_findings(model: Any, config: rt.ReplayConfig) -> Iterator[Finding]:
    """Which kinds of speculation `generate` would take."""
    yield Finding(
        NOTE,
        "assisted generation: prompt lookup and assistant models, for batches as well"
        + ("" if config.max_draft else "; max_draft=0 is raised to what the drafter needs"),
    )
    if refusal := _refusal(model, use_mtp=True):
        has_layers = mtp_layers(text_config(model.config)) is not None
        yield Finding(NOTE, f"no MTP head{' can be used' if has_layers else ''}: {refusal}")
    else:
        yield Finding(NOTE, "MTP head: one layer, by the configuration; use_mtp=True drafts with it")
    if refusal := _refusal(model, assistant_early_exit=1):
        yield Finding(NOTE, f"no early exit: {refusal}")


def _refusal(model: Any, **settings: Any) -> str | None:
    generation = GenerationConfig()
    for name, value in settings.items():
        setattr(generation, name, value)
    try:
        check_drafter(model, generation)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None
