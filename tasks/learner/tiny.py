"""tiny_qwen3: builds a small Qwen3 with a byte-level tokenizer, a real model directory for demos and tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.runtime.torchvision_operators import declare_torchvision_operators

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# ChatML as the Qwen3 family writes it: tool results are user turns, thinking can be switched off in the prompt.
CHAT_TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""".strip()


def tiny_qwen3(
    directory: str | Path,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 320,
    vocab_size: int = 512,
    max_positions: int = 2048,
    tied: bool = False,
    words: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a randomly initialised float32 Qwen3ForCausalLM and its tokenizer as a Hugging Face directory.

    The defaults make 0.82 million parameters. The same arguments give the same bytes; the caller's random state is left
    as it was. `hidden` must be a multiple of `2 * heads`, `vocab_size` at least 265 plus one for each of `words`, texts
    that are one token each (shorter samples train faster). Returns `directory` as a path.
    """
    declare_torchvision_operators()
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    directory = Path(directory)
    tokenizer = byte_tokenizer(vocab_size, max_positions, words)
    stop, pad = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=[stop, pad], pad_token_id=pad)
    with no_progress_bar():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Have transformers show no progress bar within the block: a small model is written in no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def byte_tokenizer(
    vocab_size: int, max_length: int, words: Sequence[str] = (), control: Sequence[str] = CONTROL_TOKENS
) -> Any:
    """Return a tokenizer whose first 256 ids are the byte values, then `control`, Qwen3's markup tokens, and `words`.

    Ids up to `vocab_size` are reserved tokens, so that every id the model can sample has a token. Raises ValueError
    when `vocab_size` has no room for the tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    first_reserved = 256 + len(control) + len(MARKUP_TOKENS) + len(words)
    if vocab_size < first_reserved:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and special tokens need {first_reserved}")
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{index}|>" for index in range(first_reserved, vocab_size)]
    # Ids are given in the order of these calls.
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in (*MARKUP_TOKENS, *words)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in reserved])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_characters() -> list[str]:
    """The 256 characters that byte-level tokenizers write for bytes: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(256)]
