"""Byte-level BPE tokenizers for the two families, and the token streams that the models are trained on."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TokenizerRecipe:
    """What makes one family's tokenizer: its size, its special tokens (ids 0, 1, 2) and how text is cut into words."""

    vocab_size: int
    pad: str
    bos: str
    eos: str
    words: str


RECIPES = {
    # A character in front of a word belongs to the word (" return", ".append"), line ends to the punctuation before.
    "qwen3_5": TokenizerRecipe(
        vocab_size=2048,
        pad="<|pad|>",
        bos="<|file_start|>",
        eos="<|file_end|>",
        words=r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    # A line end and the indentation after it are one word, and digits come in groups of up to three.
    "nemotron_h": TokenizerRecipe(
        vocab_size=1920,
        pad="<pad>",
        bos="<s>",
        eos="</s>",
        words=r"\n+[ \t]*| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+",
    ),
}
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CUT_CHARACTERS = (100, 700)


def train_tokenizer(recipe: TokenizerRecipe, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from ``texts``. Nothing is added to a text when it is encoded; padding goes to the left."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(recipe.words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[recipe.pad, recipe.bos, recipe.eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=recipe.pad,
        bos_token=recipe.bos,
        eos_token=recipe.eos,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def cut_at_random(text: str, rng: random.Random) -> list[str]:
    """Cut a text every few hundred characters, anywhere: prompts end inside words, so a model must know such ends."""
    pieces, start = [], 0
    while start < len(text):
        end = start + rng.randint(*CUT_CHARACTERS)
        pieces.append(text[start:end])
        start = end
    return pieces


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """All texts in random order as one int64 vector: start of file, tokens, end of file, start of file, and so on."""
    rng = random.Random(seed)
    texts = rng.sample(texts, len(texts))
    pieces: list[str] = []
    last_pieces: set[int] = set()
    for text in texts:
        pieces += cut_at_random(text, rng)
        last_pieces.add(len(pieces) - 1)
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    ids = [BOS_ID]
    for index, piece in enumerate(encoded):
        ids += piece.ids
        if index in last_pieces:
            ids += [EOS_ID, BOS_ID]
    return torch.tensor(ids[:-1])
