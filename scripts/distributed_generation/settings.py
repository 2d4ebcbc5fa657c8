"""What a run is asked to do, and how two runs differ."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from replay_transformers import ReplayConfig
from replay_transformers.cli.loading import DTYPES, CommandError, looks_local
from replay_transformers.samples import SAMPLE_MODELS, sample_model

REPLAY, FIXED = ("replay", "replay_static"), ("replay_static", "static")
CACHES = (*REPLAY, "dynamic", "static")
FIXED_MULTIPLE = 64  # what prompts are padded to a multiple of where shapes are fixed
MODEL_FILES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
PIECE = 2**20


@dataclass(frozen=True)
class Settings:
    """The options that results depend on, named as on the command line.

    ``window``, ``checkpoint``, ``readout`` and ``decay_skip`` are None where they were not given; ``pad_multiple`` is 1
    then, or with fixed shapes `FIXED_MULTIPLE`.

    Raises:
        CommandError: settings that do not exist or do not go together.
    """

    model: str
    dtype: str = "float32"
    batch: int = 8
    max_new_tokens: int = 64
    cache: str = "replay"
    window: int | None = None
    checkpoint: str | None = None
    readout: str | None = None
    decay_skip: float | None = None
    prompt_lookup: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    num_return_sequences: int = 1
    pad_multiple: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("dtype", tuple(DTYPES)), ("cache", CACHES)):
            if getattr(self, name) not in choices:
                raise CommandError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.cache not in REPLAY:
            given = [_option(name) for name in (*self._of_replay, "prompt_lookup") if getattr(self, name) is not None]
            if given:
                raise CommandError(f"{', '.join(given)} must go with --cache replay or replay_static, got {self.cache}")
        if self.do_sample and not (self.temperature > 0 and 0 < self.top_p <= 1):
            raise CommandError(
                f"--temperature must be above 0 and --top-p in (0, 1], got {self.temperature} and {self.top_p}"
            )
        if not self.do_sample and self.num_return_sequences > 1:
            raise CommandError("--num-return-sequences above 1 needs --do-sample: greedy ones would all be the same")
        self.cache_arguments()

    @property
    def _of_replay(self) -> tuple[str, ...]:
        return "window", "checkpoint", "readout", "decay_skip"

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each shape of a batch may mean a graph to compile or to record."""
        return self.cache in FIXED

    @property
    def multiple(self) -> int:
        """What the length of a batch is a multiple of."""
        return self.pad_multiple or (FIXED_MULTIPLE if self.has_fixed_shapes else 1)

    @property
    def source(self) -> str:
        """The model's folder, or its name on the hub."""
        is_sample = self.model in SAMPLE_MODELS and not looks_local(self.model)
        return sample_model(self.model) if is_sample else self.model

    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of `generate` for the cache and for drafts, whose length must not follow the clock."""
        if self.cache not in REPLAY:
            return {"cache_implementation": self.cache}
        given = {name: getattr(self, name) for name in self._of_replay if getattr(self, name) is not None}
        try:
            config = ReplayConfig(**given, seed=self.seed, draft_length="fixed")
        except (ValueError, NotImplementedError) as error:
            raise CommandError(str(error)) from error
        arguments: dict[str, Any] = {"cache_implementation": self.cache, "cache_config": config.to_dict()}
        return arguments | ({"prompt_lookup_num_tokens": self.prompt_lookup} if self.prompt_lookup else {})

    def fingerprint(self, prompts: str, device: str) -> dict[str, Any]:
        """What must be the same when a run is resumed, by option."""
        names = ["dtype", "batch", "max_new_tokens", "cache", "prompt_lookup", "do_sample", "num_return_sequences"]
        names += ["temperature", "top_p"] if self.do_sample else []
        found = {_option(name): getattr(self, name) for name in names}
        config = self.cache_arguments().get("cache_config", {})
        found |= {_option(name): config[name] for name in self._of_replay if config}
        if self.do_sample or str(config.get("checkpoint")).endswith("_sr"):
            found["--seed"] = self.seed
        found |= {"--pad-multiple": self.multiple, "--device": device}
        found |= {"--threads": self.threads} if device == "cpu" else {}
        return {"--model": _model_digest(self.source), "--prompts": prompts} | found


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, a line each."""
    names = [name for name in (then | now) if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name, 'not used')} then, {now.get(name, 'not used')} now" for name in names]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model_digest(source: str) -> str:
    """A model's name with a hash of its folder, or with its commit on the hub."""
    folder = Path(source)
    if not looks_local(source):
        try:
            commit = getattr(AutoConfig.from_pretrained(source), "_commit_hash", None)
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot load {source!r}: {str(error).strip().splitlines()[0]}") from error
        return f"{source}, commit {commit}"
    if not folder.is_dir():
        raise CommandError(f"there is no folder {source!r}")
    found = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:  # of large files three pieces: training changes every weight
            starts = range(0, size, PIECE) if size <= 64 * PIECE else (0, size // 2, size - PIECE)
            for start in starts:
                file.seek(start)
                found.update(file.read(PIECE))
    return f"{folder.resolve().name}, sha256 {found.hexdigest()[:16]}"
