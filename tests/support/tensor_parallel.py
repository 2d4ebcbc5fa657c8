"""Processes that share a model: greedy and sampled tokens, with and without drafts, each process's own to a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import replay_transformers as rt
from replay_transformers.patches.versions import generate_cache_name
from tests.support import mtp
from tests.support.models import FAMILIES, greedy_without_cache, prompt
from tests.support.speculation import perturbed

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16
HEAD = "replay/mtp"
SPLIT = {"num_attention_heads": 4, "num_key_value_heads": 2}  # by two
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 30}


def calls(assistant: Any) -> dict[str, dict[str, Any]]:
    """What `generate` is asked for, by name."""
    return {
        "greedy": {},
        "lookup": LOOKUP,
        "assistant": {"assistant_model": assistant},
        "adaptive": {**LOOKUP, "adaptive": True},
        "sampled-lookup": {**LOOKUP, **SAMPLED},
        "sampled-assistant": {"assistant_model": assistant, **SAMPLED},
    }


def tokens_of(model: Any, assistant: Any, inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The sequences of every call on both kinds of caches."""
    outputs = {}
    for implementation in ("replay", "replay_static"):
        for name, call in calls(assistant).items():
            torch.manual_seed(seed)
            arguments = {"do_sample": False, **call}
            lengths = "adaptive" if arguments.pop("adaptive", False) else "fixed"
            output = model.generate(
                **inputs,
                max_new_tokens=STEPS,
                **arguments,
                pad_token_id=0,
                cache_implementation=implementation,
                cache_config={"window": 4, "draft_length": lengths},
            )
            outputs[f"{implementation}/{name}"] = output.cpu()
    return outputs


def with_head(model: Any, **more: Any) -> torch.Tensor:
    """What a sample model continues its text with, with drafts of its own head if told so."""
    given = {name: tensor.to(model.device) for name, tensor in mtp.inputs("qwen3_5", 2).items()}
    common = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": "replay"}
    return model.generate(**given, **common, cache_config={"draft_length": "fixed"}, **more).cpu()


def held_by(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of a cache by kind after a few tokens."""
    cache = rt.ReplayCache(model.config)
    with torch.no_grad():
        model(**inputs, **{generate_cache_name(): cache}, use_cache=True)
    return cache.memory_footprint()


def main(model_path: str, assistant_path: str, output: str) -> None:
    """One process: load, generate, write; with other random numbers than the others."""
    torch.set_num_threads(1)
    with rt.enable():
        model = AutoModelForCausalLM.from_pretrained(model_path, tp_plan="auto", dtype=torch.float32)
        assistant = AutoModelForCausalLM.from_pretrained(assistant_path, dtype=torch.float32).to(model.device)
        rank, inputs = dist.get_rank(), prompt(3, 9, [0, 4, 2])
        outputs = tokens_of(model, assistant, {n: tensor.to(model.device) for n, tensor in inputs.items()}, seed=rank)
        cache = held_by(model, {name: tensor.to(model.device) for name, tensor in inputs.items()})
        if mtp.HAS_MTP:
            sample = AutoModelForCausalLM.from_pretrained(
                rt.sample_model("qwen3_5"), tp_plan="auto", dtype=torch.float32
            )
            outputs[HEAD] = with_head(sample, use_mtp=True)
    weights = {name: weight for name, weight in model.named_parameters() if "q_proj" in name or "experts" in name}
    own = {name: getattr(weight, "to_local", lambda weight=weight: weight)() for name, weight in weights.items()}
    counts = {name: weight.numel() for name, weight in own.items()}
    torch.save({"outputs": outputs, "own": counts, "cache": cache}, Path(output) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def check_two_processes(family: str, folder: Path, on_gpus: bool) -> None:
    """Two of them: the tokens of one process without a cache, and the same in both."""
    model = FAMILIES[family](**SPLIT)
    model.save_pretrained(folder / "model")
    perturbed(model, 0.03).save_pretrained(folder / "assistant")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "localhost:0", "-m", "tests.support.tensor_parallel",
        str(folder / "model"), str(folder / "assistant"), str(folder),
    ]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))

    whole = {name: weight.numel() for name, weight in model.named_parameters()}
    split = [name for name, count in first["own"].items() if 2 * count == whole[name]]
    # transformers splits Qwen3.5's attention and Nemotron-H's experts; the state-space layers are whole everywhere
    assert split
    assert family != "qwen3_5" or all("q_proj" in name for name in split)
    inputs = prompt(3, 9, [0, 4, 2])
    with rt.enable():
        alone = held_by(model, inputs)
    parts = 2 if family == "qwen3_5" else 1
    for ranks in (first, second):
        assert ranks["cache"] | {"attention": 0} == alone | {"attention": 0}, "states are whole in every process"
        assert parts * ranks["cache"]["attention"] == alone["attention"] > 0
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    assert (HEAD in first["outputs"]) == mtp.HAS_MTP
    for name, tokens in first["outputs"].items():
        assert torch.equal(tokens, second["outputs"][name]), f"{name}: the processes parted"
        if name == HEAD:
            with rt.enable():
                assert torch.equal(tokens, with_head(mtp.sample_qwen3_5())), name
        elif "sampled" not in name:
            assert torch.equal(tokens, truth), name
    sampled = [tokens for name, tokens in first["outputs"].items() if "sampled" in name]
    assert not any(torch.equal(tokens, truth) for tokens in sampled)


if __name__ == "__main__":
    main(*sys.argv[1:])
