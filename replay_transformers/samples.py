"""The small trained models that are shipped with the package."""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "models"
SAMPLE_MODELS = ("nemotron_h", "nemotron_h_draft", "qwen3_5", "qwen3_5_draft")


def sample_model(name: str) -> str:
    """The folder of a sample model, for ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.

    ``qwen3_5`` and ``nemotron_h`` are the models, ``qwen3_5_draft`` and ``nemotron_h_draft`` smaller ones that share
    their tokenizers. Raises ValueError for any other name.
    """
    if name not in SAMPLE_MODELS:
        raise ValueError(f"expected a sample model out of {', '.join(SAMPLE_MODELS)}, got {name!r}")
    return str(_FOLDER / name)
