"""How large the tiny models are. A few MB each, quick on a CPU."""

# Head width 64: vLLM's CPU attention wants 32 or more. Two heads over one key head also exercises grouped queries.
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
VISION_HIDDEN = 64
VISION = {
    "hidden_size": VISION_HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
# As published: the feature extractor makes spectra of this many bands.
MEL_BANDS = 128
AUDIO = {
    "num_mel_bins": MEL_BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    # Of 30 seconds, to which the feature extractor fills every sound.
    "max_source_positions": 1500,
}
