"""The files of a folder that transformers reads, beside its weights: configuration and tokenizer.

Needs the standard library only. The tokenizer is written as tokenizer.json: byte-level BPE with GPT-2's merges, or
with none for the tokenizer of bytes.
"""

from __future__ import annotations

from typing import Any

from gpt2.tokenizer import END_OF_TEXT, VOCABULARY_FILE, Tokenizer, printable_bytes, ranks
from runtime.settings import GPT2, ModelConfig

NORM_EPSILON = 1e-5  # torch's default for nn.LayerNorm, and GPT-2's


def model_config(config: ModelConfig, eot: int) -> dict[str, Any]:
    """Return config.json of GPT2LMHeadModel. eot: the id of the end of text."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": NORM_EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """Return name -> content (JSON values) of tokenizer.json and tokenizer_config.json."""
    special = {
        "id": tokenizer.eot,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    vocabulary, merges = _byte_pairs() if tokenizer.eot == GPT2.size - 1 else (_bytes_alone(), [])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": bool(merges)}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [special],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {**vocabulary, END_OF_TEXT: tokenizer.eot},
                "merges": merges,
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": block_size,
            "clean_up_tokenization_spaces": False,
        },
    }


def _byte_pairs() -> tuple[dict[str, int], list[str]]:
    """Return GPT-2's tokens in printable characters, and its merges in their order."""
    text = VOCABULARY_FILE.read_text(encoding="utf-8")
    shown = {byte: character for character, byte in printable_bytes().items()}
    tokens = {"".join(shown[byte] for byte in token): rank for token, rank in ranks(text).items()}
    return tokens, [line for line in text.split("\n")[1:] if line]


def _bytes_alone() -> dict[str, int]:
    return dict(printable_bytes())
