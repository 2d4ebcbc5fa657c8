"""Assisted generation of batches: rows accept different numbers of drafts, and get the tokens of plain decoding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.batches import Oracle, observed
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.models import FAMILIES, PAD, greedy_without_cache, prompt
from tests.support.speculation import Collect, assert_as_if_fed, never_right, never_unsure, perturbed
from tests.test_assisted import EVERY_CACHE, EVERY_FAMILY, EVERY_WINDOW, mostly_right, sample, tiny, tiny_llama

pytestmark = pytest.mark.usefixtures("enabled")

PADS = [0, 4, 2, 0, 6]
STEPS = 24
TEXTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "for name in names:\n    print(name)\nfor name in names:\n    ",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return ",
    "import os\nimport sys\nimport re\nimport os\n",
    "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2",
]


def settings(implementation: str = "replay", window: int = 3, **more: Any) -> dict[str, Any]:
    """Greedy, always the longest draft."""
    return {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "cache_implementation": implementation,
        "cache_config": {"window": window, "draft_length": "fixed"},
        **more,
    }


@functools.cache
def truth(family: str, steps: int = STEPS) -> torch.Tensor:
    """Greedy decoding of five padded rows with a full forward per token."""
    inputs = prompt(5, 9, PADS)
    return greedy_without_cache(tiny(family), inputs["input_ids"], inputs["attention_mask"], steps)


@functools.cache
def texts(family: str) -> dict[str, torch.Tensor]:
    """Five prompts for the trained models, of different lengths."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(rt.sample_model(family), padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


@functools.cache
def trained_truth(family: str) -> torch.Tensor:
    """What the trained models make of them."""
    inputs = texts(family)
    return greedy_without_cache(sample(family), inputs["input_ids"], inputs["attention_mask"], STEPS)


@pytest.mark.core
@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_an_assistant(family: str, window: int, implementation: str) -> None:
    model, assistant = tiny(family), mostly_right(family)
    with observed(model) as rounds:
        output = model.generate(**prompt(5, 9, PADS), **settings(implementation, window), assistant_model=assistant)
    assert torch.equal(output, truth(family))
    rounds.check()


@pytest.mark.core
@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_prompt_lookup(family: str, window: int, implementation: str) -> None:
    model = sample(family)
    with observed(model) as rounds:
        output = model.generate(**texts(family), **settings(implementation, window), prompt_lookup_num_tokens=4)
    assert torch.equal(output, trained_truth(family))
    rounds.check()


@pytest.mark.core
@EVERY_CACHE
@EVERY_FAMILY
@pytest.mark.parametrize("pattern", ["mixed", "right", "wrong"])
def test_a_drafter_that_is_right_wrong_or_silent(pattern: str, family: str, implementation: str) -> None:
    """The number of target forwards is what it must be; rows that draft nothing and rows that do go together."""
    model, oracle = tiny(family), Oracle(truth(family), 4, pattern)
    with observed(model, lambda drafter: oracle) as rounds:
        output = model.generate(**prompt(5, 9, PADS), **settings(implementation), prompt_lookup_num_tokens=4)
    assert torch.equal(output, truth(family))
    if pattern == "mixed":
        rounds.check()
        assert any(0 in proposed and max(proposed) > 0 for proposed in rounds.proposed)
        assert any(max(proposed) == 0 for proposed in rounds.proposed)
    else:
        accepted = 4 if pattern == "right" else 0
        assert len(rounds.forwards) == 1 + -(-(STEPS - 1) // (accepted + 1))
        rounds.check(accepting=accepted, rejecting=not accepted)


@EVERY_FAMILY
def test_other_assistants(family: str) -> None:
    """Another family, an attention model, one that is never right: worse drafts, the same tokens."""
    other = next(name for name in FAMILIES if name != family)
    for assistant in (perturbed(tiny(other), 0.0), tiny_llama(), never_right(tiny(family))):
        with observed(tiny(family)) as rounds:
            output = tiny(family).generate(
                **prompt(5, 9, PADS), **settings(max_new_tokens=9), assistant_model=never_unsure(assistant)
            )
        assert torch.equal(output, truth(family)[:, :18])
        rounds.check(accepting=0)


def test_an_attention_assistant_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's own tokens as truth: a llama drafts for a copy of itself, in rows that reject apart."""
    from replay_transformers.generation.drafters.assistant import Assistant
    from replay_transformers.generation.rows import Rows
    from replay_transformers.patches.row_models import AttentionRows

    llama, inputs = tiny_llama(), prompt(3, 9, [0, 4, 2])
    expected = greedy_without_cache(llama, inputs["input_ids"], inputs["attention_mask"], 20)
    rows = Rows(inputs["input_ids"], inputs["attention_mask"], PAD)
    rows.append(expected[:, 9:10], torch.ones(3, dtype=torch.int64))
    rows.read()
    drafter = Assistant(AttentionRows(llama), 3, transformers.LogitsProcessorList(), do_sample=False)
    with torch.no_grad():
        drafter.start(rows, None)
        for added in ([4, 1, 2], [1, 1, 1], [2, 4, 3], [3, 2, 1]):
            draft = drafter.draft(rows, 3)
            places = rows.lengths[:, None] + torch.arange(4)
            assert torch.equal(draft.tokens, expected.gather(1, places[:, :3]))
            rows.append(expected.gather(1, places), torch.tensor(added))
            rows.read()
            drafter.verified(rows, 3, torch.tensor(added), None)


@pytest.mark.core
@EVERY_CACHE
@EVERY_FAMILY
def test_rows_that_end_apart(family: str, implementation: str) -> None:
    """End-of-sequence tokens inside accepted blocks: padding behind them, as in plain generation."""
    model, inputs, inside = tiny(family), prompt(5, 9, PADS), 0
    for end in truth(family)[:, 12:18].unique().tolist()[:5]:
        arguments = settings(implementation, eos_token_id=end)
        plain = model.generate(**inputs, **arguments)
        with observed(model, lambda drafter: Oracle(truth(family), 4, "right")) as rounds:
            output = model.generate(**inputs, **arguments, prompt_lookup_num_tokens=4)
        assert torch.equal(output, plain)
        inside += sum(
            1 < row[-1] < 5 for row in ([n for n in row if n] for row in zip(*rounds.added, strict=True)) if row
        )
    assert inside >= 2


class EveryFifth(transformers.StoppingCriteria):
    """Looks at the last token and at how long the sequence is."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 5 == 0) & (input_ids.shape[1] > 12)


@pytest.mark.core
@EVERY_CACHE
@EVERY_FAMILY
@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
        {"no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(3 + batch, 60))},
        {"stopping_criteria": transformers.StoppingCriteriaList([EveryFifth()])},
        {"stopping_criteria": transformers.StoppingCriteriaList([EveryFifth()]), "eos_token_id": [3, 4]},
    ],
    ids=lambda extra: "-".join(extra),
)
@pytest.mark.parametrize("count", [1, 5])
def test_processors_and_criteria(count: int, extra: dict[str, Any], family: str, implementation: str) -> None:
    """What looks at the sequence sees each row as it is; scores and logits are those of plain generation.

    Logits of forwards of other lengths differ by rounding, about 1e-5 in these models.
    """
    model, inputs, assistant = tiny(family), prompt(count, 9, PADS[:count]), mostly_right(family)
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    arguments = settings(implementation, **extra, **more)
    plain = model.generate(**inputs, **arguments)
    with observed(model) as rounds:
        output = model.generate(**inputs, **arguments, assistant_model=assistant)
    assert torch.equal(output.sequences, plain.sequences)
    is_long = count > 1 or "eos_token_id" not in extra  # one row may end before it accepts anything
    rounds.check(accepting=int(is_long), evened=True)
    new = plain.sequences[:, 9:]
    finished = torch.isin(new, torch.tensor(extra.get("eos_token_id", [])))
    if "stopping_criteria" in extra:
        finished |= (new % 5 == 0) & (torch.arange(9, plain.sequences.shape[1]) >= 12)
    for values, expected in ((output.scores, plain.scores), (output.logits, plain.logits)):
        assert len(values) == len(expected)
        for place, (got, want) in enumerate(zip(values, expected, strict=True)):
            going_on = ~finished[:, :place].any(1)
            torch.testing.assert_close(got[going_on], want[going_on], rtol=0, atol=2e-4)


@EVERY_CACHE
@EVERY_FAMILY
def test_stop_strings(family: str, implementation: str) -> None:
    model = sample(family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(rt.sample_model(family))
    for stop in (["self"], ["return", "\n\n"], ["append(item", "support\nfrom"]):  # the last ones are of several tokens
        arguments = settings(implementation, tokenizer=tokenizer, stop_strings=stop)
        plain = model.generate(**texts(family), **arguments)
        with observed(model) as rounds:
            output = model.generate(**texts(family), **arguments, prompt_lookup_num_tokens=4)
        assert torch.equal(output, plain)
        rounds.check()


@pytest.mark.core
@EVERY_CACHE
@EVERY_FAMILY
def test_what_is_left_in_the_cache(family: str, implementation: str) -> None:
    """As if the result had been fed: padding behind finished rows included; a second turn sees only what is new."""
    model, inputs = tiny(family), prompt(5, 9)
    end = truth(family)[0, 14].item()
    output = model.generate(
        **inputs,
        **settings(implementation, eos_token_id=end, max_length=None, max_cache_len=64),
        assistant_model=mostly_right(family),
        return_dict_in_generate=True,
    )
    cache = returned_cache(output)
    assert not cache.cursor.recording
    assert not cache.cursor.ragged
    assert_as_if_fed(model, cache, output.sequences[:, :-1])
    ids = torch.cat([output.sequences, prompt(5, 3, seed=7)["input_ids"]], dim=1)
    again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy_without_cache(model, ids, again["attention_mask"], 8)
    assistant = mostly_right(family)
    with observed(model) as rounds:
        second = model.generate(
            **again, max_new_tokens=8, do_sample=False, assistant_model=assistant, **{CACHE_ARGUMENT: cache}
        )
    assert torch.equal(second, expected)
    assert rounds.forwards[0] == 4, "the last token of the first turn and three new ones"


@EVERY_FAMILY
def test_streamers_get_what_all_rows_have(family: str) -> None:
    model, streamer = tiny(family), Columns()
    end = truth(family)[1, 12].item()
    output = model.generate(
        **prompt(5, 9, PADS),
        **settings(eos_token_id=end),
        assistant_model=mostly_right(family),
        streamer=streamer,
    )
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.blocks, dim=1), output)
    assert len(streamer.blocks) > 3


class Columns(Collect):
    """Keeps whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        """Keep the block."""
        self.blocks.append(value)


def test_memory_does_not_grow_over_calls_with_rejections() -> None:
    import gc

    model, arguments, counts = tiny("qwen3_5"), settings(max_new_tokens=6), []
    assistant = never_right(model)
    for _ in range(5):
        model.generate(**prompt(5, 9, PADS), **arguments, assistant_model=assistant)
        gc.collect()
        counts.append(sum(isinstance(thing, rt.ReplayCache) for thing in gc.get_objects()))
    assert counts[-1] == counts[1]


def test_bad_calls() -> None:
    model, inputs = tiny("qwen3_5"), prompt(2, 9)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(max_draft=4))
    with pytest.raises(ValueError, match=r"one more in a batch: 5.*max_draft=4.*ReplayConfig\(max_draft=5\)"):
        model.generate(**inputs, prompt_lookup_num_tokens=4, **{CACHE_ARGUMENT: cache})
    with pytest.raises(ValueError, match=r"leave num_beams at 1"):
        model.generate(**inputs, **settings(num_beams=2), prompt_lookup_num_tokens=3)
    with pytest.raises(NotImplementedError, match=r"ClassifierFreeGuidance.* generate without one"):
        model.generate(**inputs, **settings(), prompt_lookup_num_tokens=3, guidance_scale=2.0)
    with pytest.raises(ValueError, match=r"scores of shape \(2, 5\) for 2 rows"):
        model.generate(
            **inputs,
            **settings(),
            prompt_lookup_num_tokens=3,
            logits_processor=transformers.LogitsProcessorList([lambda ids, scores: scores[:, :5]]),
        )
    with pytest.raises(ValueError, match=r"draft_length must be one of"):
        model.generate(**inputs, **settings() | {"cache_config": {"draft_length": "long"}}, prompt_lookup_num_tokens=3)
    ragged = rt.ReplayCache(model.config)
    with torch.no_grad():
        ragged.activate_past_recording()
        model(inputs["input_ids"], **{CACHE_ARGUMENT: ragged})
        ragged.crop(torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"bring them to one length and call cache.join_rows\(\)"):
        model.generate(**inputs, max_new_tokens=3, **{CACHE_ARGUMENT: ragged})


@pytest.mark.parametrize("rows", [1, 3])
def test_a_language_that_drafts_may_leave(rows: int) -> None:
    """What allows tokens by the ones before is not asked behind a draft that it forbids, nor about made-up rows."""
    model, inputs = tiny("qwen3_5"), prompt(rows, 9, [0, 2, 4][:rows])

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        last = int(ids[-1])
        assert len(ids) == 9 or last % 3 == row, "a token of another row's language, or a forbidden one"
        return list(range(3 + row, 90, 3))

    plain = model.generate(**inputs, **settings(), prefix_allowed_tokens_fn=allowed)
    for drafter in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": mostly_right("qwen3_5")}):
        assert torch.equal(model.generate(**inputs, **settings(), prefix_allowed_tokens_fn=allowed, **drafter), plain)


@pytest.mark.parametrize("how", ["shifted", "stretched", "padded on the right"])
def test_positions_of_the_users_own(how: str) -> None:
    """They go on from the last one, as in plain generation."""
    model, inputs = tiny("qwen3_5"), prompt(3, 9)
    if how == "padded on the right":
        inputs["attention_mask"][1, -3:] = 0
    else:
        places = torch.arange(9).expand(3, -1)
        inputs["position_ids"] = places + 37 if how == "shifted" else places * 3
    plain = model.generate(**inputs, **settings())
    for drafter in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": mostly_right("qwen3_5")}):
        assert torch.equal(model.generate(**inputs, **settings(), **drafter), plain)


@pytest.mark.parametrize("place", ["criterion", "streamer"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_users_cache_after_an_exception(rows: int, place: str) -> None:
    """It holds what was accepted and nothing else; where rows are of one length the next call goes on with it."""
    model, cache, calls = tiny("qwen3_5"), rt.ReplayCache(tiny("qwen3_5").config), []

    class Fails(Collect, transformers.StoppingCriteria):
        def put(self, value: torch.Tensor) -> None:
            self(value, None)

        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 6:
                raise RuntimeError("on purpose")
            return torch.zeros(len(ids), dtype=torch.bool)

    fails = {"streamer": Fails()} if place == "streamer" else {"stopping_criteria": [Fails()]}
    inputs, arguments = prompt(rows, 9), settings() | {"cache_implementation": None, "cache_config": None}
    with pytest.raises(RuntimeError, match="on purpose"):
        model.generate(**inputs, **arguments, **fails, assistant_model=never_right(model), **{CACHE_ARGUMENT: cache})
    assert not cache.cursor.recording
    assert not cache.cursor.ragged
    seen = int(cache.get_seq_length())
    ids = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 16)
    assert 9 < seen < ids.shape[1]
    again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy_without_cache(model, ids, again["attention_mask"], 6)
    output = model.generate(**again, max_new_tokens=6, do_sample=False, **{CACHE_ARGUMENT: cache})
    assert torch.equal(output, expected)


def test_other_inputs() -> None:
    """int32 ids are taken; embeddings are not enough for an assistant; inference mode leaves nothing behind."""
    model, inputs = tiny("qwen3_5"), prompt(3, 9)
    plain, small = model.generate(**inputs, **settings()), inputs | {"input_ids": inputs["input_ids"].int()}
    assert torch.equal(model.generate(**small, **settings(), prompt_lookup_num_tokens=3), plain)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    with pytest.raises(ValueError, match="not inputs_embeds alone"):
        model.generate(**embedded, **settings(), assistant_model=mostly_right("qwen3_5"))
    for mode in (True, False):
        with torch.inference_mode(mode):
            output = model.generate(**inputs, **settings("replay_static"), prompt_lookup_num_tokens=3)
        assert torch.equal(output, plain)
