"""Reading config fields strictly: typed, with the documented defaults, and nothing that touches the maths overlooked.

Knows the names shared by all families; what a family adds stands in its own module.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..spec import ModelError
from .rope_fields import ROPE_FIELDS, rope_spec

Config = Mapping[str, Any]

DENSE_FIELDS = ROPE_FIELDS | {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "layer_types",
    "quantization_config",  # checked by weights/schemes.py
    "compression_config",
}

# Fields that do not change what a forward pass computes.
MOST_CONTEXT = 2**24  # tokens: more than any published model has
HARMLESS_FIELDS = frozenset(
    """
    _name_or_path name_or_path architectures auto_map transformers_version transformers_weights torch_dtype dtype
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attn unsloth_version unsloth_fixed
    transformers.js_config task_specific_params custom_pipelines
    initializer_range initializer_factor attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
    classifier_dropout use_cache cache_implementation pretraining_tp gradient_checkpointing
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    mask_token_id image_token_id forced_bos_token_id forced_eos_token_id
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef return_dict torchscript
    use_bfloat16 chunk_size_feed_forward pruned_heads finetuning_task problem_type id2label label2id num_labels
    is_decoder is_encoder_decoder prefix tokenizer_class bad_words_ids suppress_tokens begin_suppress_tokens
    do_sample temperature top_p top_k min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size max_length max_new_tokens min_length early_stopping num_beams
    num_beam_groups diversity_penalty num_return_sequences remove_invalid_values exponential_decay_length_penalty
    return_dict_in_generate output_scores
    """.split()  # noqa: SIM905 (a table of names reads better in lines than one per line)
)


def refuse_unknown(config: Config, understood: Iterable[str]) -> None:
    """Raises ModelError for a field outside the known lists whose value says more than "off"."""
    known = HARMLESS_FIELDS.union(understood)
    for name, value in config.items():
        if name not in known and not _neutral(value):
            raise ModelError(f"config field {name} is not understood (value {_short(value)}); the model is refused")


def _neutral(value: Any) -> bool:
    if value is True:
        return False
    return value is None or (isinstance(value, (bool, int, float)) and value in (0, 1))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def positive(config: Config, name: str, default: int | None = None) -> int:
    """A whole number above 0; absent or null takes the default, or is an error without one."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config field {name}: must be a whole number above 0, got {_short(value)}")
    return value


def flag(config: Config, name: str) -> bool:
    """True or false; absent or null is false."""
    value = config.get(name)
    if value not in (None, True, False):
        raise ModelError(f"config field {name}: must be true or false, got {_short(value)}")
    return bool(value)


def dense_fields(config: Config) -> dict[str, Any]:
    """The `ModelSpec` arguments that every dense family reads in the same way."""
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    head_dim = positive(config, "head_dim", hidden // heads)
    kv_heads = positive(config, "num_key_value_heads", heads)
    _check_heads(config, heads, kv_heads, head_dim)
    _check_activation(config)
    context = _context(config)
    return {
        "model_type": config["model_type"],
        "vocab_size": positive(config, "vocab_size"),
        "context_length": context,
        "hidden_size": hidden,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_layers": positive(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_epsilon": _epsilon(config),
        "rope": rope_spec(config, head_dim, context),
        "tied": flag(config, "tie_word_embeddings"),
    }


def _context(config: Config) -> int:
    """Tokens of a row; tables of angles are made for so many."""
    context = positive(config, "max_position_embeddings")
    if context > MOST_CONTEXT:
        raise ModelError(f"config field max_position_embeddings: {context}, beyond {MOST_CONTEXT}; the file is damaged")
    return context


def _check_heads(config: Config, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise ModelError(f"config field num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        raise ModelError(f"config field head_dim: must be even for rotary encoding, got {head_dim}")
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise ModelError(
            f"config field head_dim: absent, and hidden_size {config['hidden_size']} is no multiple of {heads}"
        )


def _check_activation(config: Config) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"config field hidden_act: {config['hidden_act']!r} is not supported (there are: silu)")


def _epsilon(config: Config) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ModelError(f"config field rms_norm_eps: must be a small number, got {_short(value)}")
    return float(value)


def sliding_window(config: Config) -> int | None:
    """`sliding_window` as a number of keys, or None."""
    return None if config.get("sliding_window") is None else positive(config, "sliding_window")


def layer_windows(config: Config, implied: Sequence[int | None]) -> tuple[int | None, ...]:
    """One window per layer where the family itself says which layers slide; `layer_types` may only repeat it."""
    given = layer_types(config, len(implied))
    for index, (kind, window) in enumerate(zip(given, implied, strict=False)):
        if (kind == "sliding_attention") != (window is not None):
            raise ModelError(f"config field layer_types: entry {index} is {kind!r}, which contradicts sliding_window")
    return tuple(implied)


def layer_types(config: Config, num_layers: int) -> list[str]:
    """The list of `layer_types`, empty when absent. Raises ModelError for a wrong length or an unknown entry."""
    given = config.get("layer_types") or []
    if given and len(given) != num_layers:
        raise ModelError(f"config field layer_types: {len(given)} entries for {num_layers} layers")
    for index, kind in enumerate(given):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"config field layer_types: entry {index}, {kind!r}, is not supported")
    return list(given)


def qwen_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: nothing slides unless `use_sliding_window`; `layer_types` beats `max_window_layers`."""
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    given = layer_types(config, num_layers)
    if not given:
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    if window is None and "sliding_attention" in given:
        raise ModelError("config field layer_types: has sliding_attention, but no sliding window is set")
    return tuple(window if kind == "sliding_attention" else None for kind in given)
