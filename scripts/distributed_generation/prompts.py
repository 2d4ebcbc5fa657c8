"""Prompts: read from a file, encoded, and put into batches that depend on nothing but the prompts."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replay_transformers.cli.loading import CommandError

JSON_LINES = (".jsonl", ".ndjson", ".json")
TOGETHER = 1000  # prompts that are encoded in one call


@dataclass(frozen=True)
class Prompt:
    """A prompt, or what is wrong with its line.

    Args:
        index: its place among the prompts, from 0.
        text: what to continue; None where the line has no text.
        name: the line's "id"; None if it has none.
        error: why nothing is generated for it.
        ids: its tokens, once it is encoded.
    """

    index: int
    text: str | None
    name: Any = None
    error: str | None = None
    ids: tuple[int, ...] = ()

    @property
    def head(self) -> dict[str, Any]:
        """How its line of the output begins."""
        name = {} if self.name is None else {"id": self.name}
        return {"index": self.index, **name, "prompt": self.text}


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated together.

    Args:
        number: its place among the batches, from 0.
        indices: of its prompts.
        length: tokens that the prompts are padded to.
    """

    number: int
    indices: tuple[int, ...]
    length: int


def read_prompts(path: Path, field: str, limit: int | None) -> list[Prompt]:
    """The prompts of a file, at most ``limit``: JSON lines by its suffix, else a prompt per line; no blank lines.

    Raises:
        CommandError: the file cannot be read, or has no prompt.
    """
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise CommandError(f"cannot read --prompts {str(path)!r}: {error.strerror}") from error
    read = _from_json if path.suffix.lower() in JSON_LINES else _from_text
    prompts: list[Prompt] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(read(len(prompts), number, line.removesuffix(b"\r"), field))
    if not any(prompt.text for prompt in prompts):
        what = f": {prompts[0].error}" if prompts and prompts[0].error else ""
        raise CommandError(f"--prompts {str(path)!r} has no prompt{what}")
    return prompts


def _from_text(index: int, number: int, line: bytes, field: str) -> Prompt:
    try:
        return Prompt(index, line.decode())
    except UnicodeDecodeError as error:
        return Prompt(index, None, error=f"line {number} is not UTF-8: {error.reason}")


def _from_json(index: int, number: int, line: bytes, field: str) -> Prompt:
    try:
        value = json.loads(line)
        json.dumps(value)  # an id is written as it was read, and that can be too deep as well
    except ValueError as error:  # also what is not UTF-8
        return Prompt(index, None, error=f"line {number} is not JSON: {error}")
    except RecursionError:
        return Prompt(index, None, error=f"line {number} is nested too deeply")
    if not isinstance(value, dict):
        return Prompt(index, None, error=f"line {number}: expected an object, got {type(value).__name__}")
    name, text = value.get("id"), value.get(field)
    if field not in value:
        return Prompt(index, None, name, f"line {number} has no {field!r}, only {', '.join(map(repr, value))}")
    if not isinstance(text, str):
        return Prompt(index, None, name, f"line {number}: {field!r} must be a string, got {type(text).__name__}")
    return Prompt(index, text, name)


def digest(prompts: list[Prompt]) -> str:
    """How many prompts there are, and a hash of them."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(json.dumps([prompt.name, prompt.text, prompt.error]).encode() + b"\n")
    return f"{len(prompts)}, sha256 {found.hexdigest()[:16]}"


def encode(prompts: list[Prompt], tokenizer: Any, positions: int | None, new_tokens: int) -> list[Prompt]:
    """The prompts with their tokens, or with the reason why there can be no completion.

    Args:
        prompts: as read.
        tokenizer: of the model.
        positions: that the model has; None: any number.
        new_tokens: that are to be generated behind a prompt.
    """
    encoded: list[Prompt] = []
    for begin in range(0, len(prompts), TOGETHER):
        some = prompts[begin : begin + TOGETHER]
        texts = [prompt.text for prompt in some if prompt.error is None]
        try:
            found = iter(tokenizer(texts)["input_ids"] if texts else [])
            encoded += [_checked(prompt, next(found), positions, new_tokens) for prompt in some if not prompt.error]
            encoded += [prompt for prompt in some if prompt.error]
        except Exception:  # which of them it was is found one by one
            encoded += [_encode_one(prompt, tokenizer, positions, new_tokens) for prompt in some]
    return sorted(encoded, key=lambda prompt: prompt.index)


def _encode_one(prompt: Prompt, tokenizer: Any, positions: int | None, new_tokens: int) -> Prompt:
    if prompt.error is not None:
        return prompt
    try:
        return _checked(prompt, tokenizer(prompt.text)["input_ids"], positions, new_tokens)
    except Exception as error:
        return replace(prompt, error=f"cannot be encoded: {type(error).__name__}: {error}")


def _checked(prompt: Prompt, ids: list[int], positions: int | None, new_tokens: int) -> Prompt:
    if not ids:
        return replace(prompt, error="the prompt has no tokens")
    if positions is not None and len(ids) + new_tokens > positions:
        return replace(
            prompt,
            error=f"too long: {len(ids)} tokens and {new_tokens} new ones, and the model has {positions} positions",
        )
    return replace(prompt, ids=tuple(ids))


def form_batches(prompts: list[Prompt], size: int, multiple: int) -> list[Batch]:
    """Batches of ``size`` prompts of similar length, the longest first, padded to a multiple of ``multiple``.

    Which prompts share a batch, and in which row each is, follows from the prompts alone.
    """
    order = sorted(
        (prompt for prompt in prompts if not prompt.error), key=lambda prompt: (-len(prompt.ids), prompt.index)
    )
    batches = []
    for number, begin in enumerate(range(0, len(order), size)):
        some = order[begin : begin + size]
        length = -(-len(some[0].ids) // multiple) * multiple
        batches.append(Batch(number, tuple(prompt.index for prompt in some), length))
    return batches
