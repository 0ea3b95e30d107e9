"""The sizes of the tiny models: a few MB each, and fast on a CPU."""

# The head width is 64, because vLLM's CPU attention requires at least 32. Two heads over one key
# head also exercise grouped queries.
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
# The number of frequency bands of the feature extractor, as published.
MEL_BANDS = 128
AUDIO = {
    "num_mel_bins": MEL_BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    # 30 seconds: the feature extractor pads every sound to this length.
    "max_source_positions": 1500,
}
