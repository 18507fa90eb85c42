"""tiny_qwen3_vl: builds a small Qwen3-VL with tokenizer and image processor, for presets and tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.learner.tiny import CONTROL_TOKENS, END_OF_TEXT, TURN_END, byte_tokenizer, no_progress_bar
from tasks.runtime.torchvision_operators import declare_torchvision_operators

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH, MERGE = 8, 2
"""Side of a patch in pixels, and how many patches a side are one token: a token stands for 16 x 16 pixels."""
LEAST_PIXELS, MOST_PIXELS = 16 * 16, 128 * 128
"""What the processor scales smaller and larger images to."""

# ChatML with images among the texts of a turn, as the Qwen3-VL family writes it.
CHAT_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content or [] %}
{%- if part.type in ('image', 'image_url') %}{{- 'IMAGE' }}{%- elif 'text' in part %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip().replace("IMAGE", IMAGE)


def tiny_qwen3_vl(
    directory: str | Path,
    *,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 3,
    vocab_size: int = 384,
    max_positions: int = 2048,
    words: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a random float32 Qwen3VLForConditionalGeneration with tokenizer and processor as a Hugging Face directory.

    The defaults make 0.63 million parameters. The same arguments give the same bytes; the caller's random state is left
    as it was. `hidden` is `heads` times 32. Returns `directory` as a path.
    """
    declare_torchvision_operators()
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    directory = Path(directory)
    tokenizer = byte_tokenizer(vocab_size, max_positions, words, (*CONTROL_TOKENS, *VISION_TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = _config(tokenizer, hidden, layers, heads, vocab_size, max_positions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config).float()
        spread_weights(model)
    stops = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[1])
    with no_progress_bar():
        model.save_pretrained(directory)
    save_processor(directory, tokenizer)
    return directory


def _config(tokenizer: Any, hidden: int, layers: int, heads: int, vocab_size: int, max_positions: int) -> Any:
    from transformers import Qwen3VLConfig

    stop, pad, start, end, image, video = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT, *VISION_TOKENS])
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": pad,
        "rope_parameters": rope,
        "dtype": "float32",
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "dtype": "float32",
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        dtype="float32",
    )


def spread_weights(model: Any) -> None:
    """Draw each matrix again with a standard deviation of 1 / sqrt(inputs): the usual 0.02 drowns what is seen."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)


def save_processor(directory: Path, tokenizer: Any) -> None:
    """Write tokenizer and image processor as one Qwen3VLProcessor."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer.save_pretrained(directory)
    sizes = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
    }
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        video_processor=Qwen3VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)
