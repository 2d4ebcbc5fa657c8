"""The processes of a run, as accelerate sees them, and the device of each."""

import os
from datetime import timedelta

import torch
from accelerate import PartialState

from replay_transformers.cli.loading import CommandError

PATIENCE = timedelta(days=7)  # processes wait for each other at the end; one that dies is its launcher's business


def joined(asked: str | None) -> PartialState:
    """accelerate's state, on a CPU if that is asked for or if there is nothing else.

    Told nothing, accelerate takes each process of a launcher for a run by itself where there is no accelerator.
    """
    is_cpu = asked == "cpu" or (asked is None and not torch.accelerator.is_available())
    return PartialState(cpu=is_cpu, timeout=PATIENCE)


def chosen_device(state: PartialState, asked: str | None) -> str:
    """The device of this process.

    Raises:
        CommandError: processes that do not know of each other, or one device for several processes.
    """
    started = os.environ.get("WORLD_SIZE", str(state.num_processes))
    if started != str(state.num_processes):
        raise CommandError(
            f"WORLD_SIZE says {started} processes, and accelerate, on {state.device.type}, knows of "
            f"{state.num_processes}: they would all do the same work. Behind a launcher --device cpu makes several "
            "work together on a CPU; without one unset WORLD_SIZE"
        )
    own = "cpu" if state.device.type == "cpu" else str(state.device)
    if asked is None or asked == own.partition(":")[0]:
        return own
    if state.num_processes > 1:
        raise CommandError(f"--device {asked} does not go with {state.num_processes} processes: leave it to accelerate")
    return asked
