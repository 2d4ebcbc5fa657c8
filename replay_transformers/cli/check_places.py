"""Where a model's layers would be, how much memory is there, and which batch fits."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_max_memory

from replay_transformers.cli.check_memory import Peak, weight_bytes
from replay_transformers.cli.loading import CommandError

__all__ = ["Place", "Places", "largest_batch", "place_model"]

OFFLOADED = ("cpu", "disk")
MOST_ROWS = 1 << 20


@dataclass
class Place:
    """A device: what of the model it holds and runs, and the bytes it has for that, if known."""

    device: str
    memory: int | None
    weights: int = 0
    layers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Places:
    """The devices that run layers, by name, and where each layer's weights are."""

    running: dict[str, Place]
    of_layer: list[str]
    device_map: dict[str, str]

    @property
    def offloaded(self) -> list[int]:
        """Layers whose weights are not on the device that runs them."""
        return [index for index, device in enumerate(self.of_layer) if device not in self.running]


def place_model(model: Any, device_map: str | None, memory: int | None) -> Places:
    """Where the layers would be.

    Args:
        model: on the device "meta".
        device_map: "auto" as in `from_pretrained`, a device for all of the model, or None: a GPU if there is one.
        memory: bytes of each device; None takes what is free on a GPU.

    Raises:
        CommandError: no such device.
    """
    if device_map == "auto":
        return _spread(model, memory)
    name = _device_name(device_map)
    place = Place(name, memory if memory is not None else _free(name), weight_bytes(model))
    place.layers = list(range(len(_layers(model))))
    return Places({name: place}, [name] * len(place.layers), {"": name})


def _layers(model: Any) -> list[Any]:
    return list(model.get_decoder().layers)


def _device_name(device: str | None) -> str:
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise CommandError(f"--device-map takes auto or a device such as cpu or cuda:0, got {device!r}") from error
    if parsed.type == "meta":
        raise CommandError("--device-map got 'meta', which holds no values")
    return f"{parsed.type}:{parsed.index or 0}" if parsed.type != "cpu" else "cpu"


def _free(device: str) -> int | None:
    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count():
        return None
    return int(torch.cuda.mem_get_info(place)[0])


def _spread(model: Any, memory: int | None) -> Places:
    """accelerate's automatic map; with ``memory`` and no GPU, that of a machine with one GPU of that size."""
    with _quiet_accelerate():
        limits: dict[Any, int] = dict(get_max_memory())
        gpus = [name for name in limits if name not in OFFLOADED]
        if memory is not None:
            limits = dict.fromkeys(gpus or [0], memory) | {"cpu": limits["cpu"]}
        whole = getattr(model, "_no_split_modules", None)
        found = infer_auto_device_map(
            model, max_memory=limits, no_split_module_classes=list(whole or ()), dtype=model.dtype
        )
    names = {part: f"cuda:{place}" if isinstance(place, int) else str(place) for part, place in found.items()}
    running = {name: Place(name, memory or _free(name)) for name in names.values() if name not in OFFLOADED}
    if not running:
        running = {"cpu": Place("cpu", None)}
    first = next(iter(running.values()))
    for name, place in running.items():
        place.weights = weight_bytes(*(_part(model, path) for path, where in names.items() if where == name))
    layers = _layers(model)
    paths = {id(module): path for path, module in model.named_modules()}
    of_layer = [_place_of(paths[id(layer)], names) for layer in layers]
    for index, name in enumerate(of_layer):
        running.get(name, first).layers.append(index)
    visiting = [weight_bytes(layers[index]) for index, name in enumerate(of_layer) if name not in running]
    first.weights += max(visiting, default=0)  # one at a time comes to the GPU
    return Places(running, of_layer, names)


def _part(model: Any, path: str) -> Any:
    found = model
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


def _place_of(path: str, names: dict[str, str]) -> str:
    """The device of a module; of one that is split, the device of its first part."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        if ".".join(parts[:length]) in names:
            return names[".".join(parts[:length])]
    return next(name for part, name in names.items() if part.startswith(f"{path}."))


@contextmanager
def _quiet_accelerate() -> Iterator[None]:
    """Without its warnings about GPUs that are asked for and not there."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def largest_batch(places: Places, footprints: list[dict[str, int]], peak: Callable[[int], Peak]) -> int | None:
    """The most sequences whose peak fits every device; None if the memory of one is not known.

    Args:
        places: the devices. footprints: bytes of one sequence in the cache by layer and kind.
        peak: the prediction for a batch.
    """
    if any(place.memory is None for place in places.running.values()):
        return None

    def spare(rows: int) -> float:
        """Bytes that are left on the fullest device."""
        predicted = peak(rows)
        activations = max(predicted.prefill, predicted.step)
        return min(
            (place.memory or 0)
            - place.weights
            - activations
            - rows * sum(sum(footprints[layer].values()) for layer in place.layers)
            for place in places.running.values()
        )

    fits, fails = 0, MOST_ROWS
    guess = 1
    while fails - fits > 1:
        guess = min(max(guess, fits + 1), fails - 1)
        left = spare(guess)
        fits, fails = (guess, fails) if left >= 0 else (fits, guess)
        slope = (spare(1) - left) / (guess - 1) if guess > 1 else spare(1) - spare(2)
        # nearly a straight line: aim at its end, then at the next one
        guess = guess + int(left // slope) if slope > 0 else (fits + fails) // 2
    return fits
