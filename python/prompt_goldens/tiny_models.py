"""Model directories without weights, in vLLM's form: configs, a tiny tokenizer, a chat template."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog. describe this image briefly. "
    "user assistant system you are a helpful assistant"
] * 10
TEMPLATES = Path(__file__).parent / "templates"
QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
LLAMA_SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<image>"]
LLAMA3_SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
# Qwen2's split of text before BPE, the same as in Qwen2Tokenizer of transformers.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n"
    r"]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(specials, bos=None, split=None):
    """Returns a tokenizer with byte-level BPE as in GPT-2 and Qwen.

    Its post-processor prepends `bos`, if given.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return tokenizer


def byte_fallback(specials, bos):
    """Returns a tokenizer with BPE over characters as in Llama 2.

    `▁` stands for a space, and byte tokens for all other characters.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        initial_alphabet=[],
        show_progress=False,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = []  # the byte tokens were special for the trainer only
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def text_config(tokenizer, **more):
    return dict(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        **more,
    )


def qwen_config(kind, tokenizer):
    ids = {
        name: tokenizer.token_to_id(token)
        for name, token in dict(
            image_token_id="<|image_pad|>",
            video_token_id="<|video_pad|>",
            vision_start_token_id="<|vision_start|>",
            vision_end_token_id="<|vision_end|>",
        ).items()
    }
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    vision = dict(depth=2, num_heads=2, spatial_merge_size=2, temporal_patch_size=2)
    if kind == "qwen2_vl":
        rope["type"] = "mrope"
        vision |= dict(embed_dim=64, hidden_size=128, mlp_ratio=2, patch_size=14)
        name = "Qwen2VLForConditionalGeneration"
    elif kind == "qwen2_5_vl":
        rope["type"] = "mrope"
        vision |= dict(
            hidden_size=64,
            intermediate_size=128,
            patch_size=14,
            window_size=112,
            out_hidden_size=128,
            fullatt_block_indexes=[1],
            tokens_per_second=2,
        )
        name = "Qwen2_5_VLForConditionalGeneration"
    else:
        rope |= {"mrope_interleaved": True, "mrope_section": [12, 10, 10]}
        vision |= dict(
            depth=3,
            hidden_size=64,
            intermediate_size=128,
            patch_size=16,
            out_hidden_size=128,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        )
        name = "Qwen3VLForConditionalGeneration"
    text = text_config(tokenizer, head_dim=64, rope_parameters=rope)
    return dict(
        model_type=kind, architectures=[name], text_config=text, vision_config=vision, **ids
    )


def qwen_processor(kind):
    patch = 16 if kind == "qwen3_vl" else 14
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    videos = "Qwen3VL" if kind == "qwen3_vl" else "Qwen2VL"
    image = dict(
        image_processor_type="Qwen2VLImageProcessor",
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
    )
    video = dict(
        video_processor_type=f"{videos}VideoProcessor",
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
    )
    return dict(processor_class=f"{prefix}Processor", image_processor=image, video_processor=video)


def llava_config(tokenizer):
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=336,
        patch_size=14,
        projection_dim=32,
        vocab_size=32,
    )
    text = text_config(tokenizer, model_type="llama")
    return dict(
        model_type="llava",
        architectures=["LlavaForConditionalGeneration"],
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.token_to_id("<image>"),
        image_seq_length=576,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
    )


def llava_processor():
    size = dict(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    return dict(
        processor_class="LlavaProcessor",
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        image_processor=dict(image_processor_type="CLIPImageProcessor", **size),
    )


def llama_config(tokenizer):
    return dict(model_type="llama", architectures=["LlamaForCausalLM"], **text_config(tokenizer))


def read_template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def write_model(out, tokenizer, config, tokenizer_config, files, processor=None):
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = dict(config, dtype="float32", bos_token_id=0, eos_token_id=1)
    tokenizer_config = dict(tokenizer_class="PreTrainedTokenizerFast") | tokenizer_config
    files = {"config.json": config, "tokenizer_config.json": tokenizer_config, **files}
    if processor:
        files["processor_config.json"] = processor
    for name, content in files.items():
        text = (
            content
            if isinstance(content, str)
            else json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        )
        (out / name).write_text(text)


def build(root):
    """Writes all directories. They have the names of the golden files."""
    qwen = byte_level(QWEN_SPECIALS)
    qwen_tokens = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None)
    llama = byte_fallback(LLAMA_SPECIALS, "<s>")
    llama_tokens = dict(
        bos_token="<s>",
        eos_token={
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        },
    )
    llama3 = byte_level(LLAMA3_SPECIALS, "<|begin_of_text|>")
    llama3_tokens = dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")

    write_model(
        root / "qwen2_vl",
        qwen,
        qwen_config("qwen2_vl", qwen),
        qwen_tokens,
        {"chat_template.jinja": read_template("qwen2_vl")},
        qwen_processor("qwen2_vl"),
    )
    # The processor's old file takes precedence over the other two, which are decoys.
    write_model(
        root / "qwen2_5_vl",
        qwen,
        qwen_config("qwen2_5_vl", qwen),
        qwen_tokens | dict(chat_template="decoy"),
        {
            "chat_template.json": {"chat_template": read_template("qwen2_vl")},
            "chat_template.jinja": "decoy",
        },
        qwen_processor("qwen2_5_vl"),
    )
    # The tokenizer class of real Qwen models, which rebuilds the tokenizer. Windows line ends must
    # make no difference.
    real = byte_level(QWEN_SPECIALS, split=QWEN_SPLIT)
    decoder = {
        str(real.token_to_id(text)): dict(
            content=text,
            lstrip=False,
            normalized=False,
            rstrip=False,
            single_word=False,
            special=True,
        )
        for text in QWEN_SPECIALS
    }
    write_model(
        root / "qwen3_vl",
        real,
        qwen_config("qwen3_vl", real),
        qwen_tokens
        | dict(
            tokenizer_class="Qwen2Tokenizer",
            add_prefix_space=False,
            add_bos_token=False,
            added_tokens_decoder=decoder,
            additional_special_tokens=QWEN_SPECIALS[1:],
        ),
        {"chat_template.jinja": read_template("qwen3_vl").replace("\n", "\r\n")},
        qwen_processor("qwen3_vl"),
    )
    write_model(
        root / "llava",
        llama,
        llava_config(llama),
        llama_tokens,
        {"chat_template.jinja": read_template("llava")},
        llava_processor(),
    )
    # A multimodal model whose template requires strings.
    write_model(
        root / "vicuna",
        llama,
        llava_config(llama),
        llama_tokens | dict(chat_template=read_template("vicuna")),
        {},
        llava_processor(),
    )
    # Text models: named templates, a file that takes precedence over the config, and only a config.
    named = [
        {"name": "tool_use", "template": "decoy"},
        {"name": "default", "template": read_template("llama3")},
    ]
    write_model(
        root / "llama3", llama3, llama_config(llama3), llama3_tokens | dict(chat_template=named), {}
    )
    write_model(
        root / "qwen3",
        qwen,
        llama_config(qwen),
        qwen_tokens | dict(chat_template="decoy"),
        {"chat_template.jinja": read_template("qwen3")},
    )
    write_model(
        root / "llama2",
        llama,
        llama_config(llama),
        llama_tokens | dict(chat_template=read_template("llama2")),
        {},
    )
    # A template with more roles and fields than the API has.
    write_model(
        root / "translator",
        qwen,
        llama_config(qwen),
        qwen_tokens,
        {"chat_template.jinja": read_template("translator")},
    )
    # Tokens that are only in the configuration.
    added = {
        str(qwen.get_vocab_size()): dict(
            content="<added>",
            lstrip=True,
            normalized=False,
            rstrip=False,
            single_word=False,
            special=False,
        )
    }
    write_model(
        root / "developer",
        qwen,
        llama_config(qwen),
        qwen_tokens
        | dict(added_tokens_decoder=added, unk_token="<unknown>", extra_special_tokens=["<extra>"]),
        {"chat_template.jinja": read_template("developer")},
    )
