"""The configuration of a model in OpenGVLab's form, for `--trust-remote-code`.

A copy of this file is part of the model directory.
"""

from transformers import AutoConfig, PreTrainedConfig


class InternVisionConfig(PreTrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PreTrainedConfig):
    model_type = "internvl_chat"
    is_composition = True
    # To print a configuration, transformers compares it with one that it creates without arguments.
    has_no_defaults_at_init = True

    def __init__(self, vision_config, llm_config, **more):
        super().__init__(**more)
        text = dict(llm_config)
        self.vision_config = InternVisionConfig(**vision_config)
        self.llm_config = AutoConfig.for_model(text.pop("model_type"), **text)
