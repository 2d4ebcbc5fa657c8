"""A tiny Qwen3.5 vision-language model."""

from typing import Any

import torch
import transformers

from tests.support.models import VOCABULARY, make_state_matter, qwen3_5_config

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 90, 91, 92, 93


def build_vision_language(seed: int = 0) -> Any:
    """Qwen3.5 with a one-block vision tower, float32."""
    torch.manual_seed(seed)
    text = qwen3_5_config().to_dict()
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "in_channels": 3,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    model = make_state_matter(transformers.Qwen3_5ForConditionalGeneration(config), seed)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def image_prompt(model: Any) -> dict[str, torch.Tensor]:
    """One row with an image of 2 x 2 merged patches between text tokens."""
    vision = model.config.vision_config
    patches, width = 4 * 4, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([[5, 6, VISION_START, *[IMAGE_TOKEN] * 4, VISION_END, 7, 8]])
    assert ids.max() < VOCABULARY
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(patches, width, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
