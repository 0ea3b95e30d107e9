"""Random LoRA adapters for the tiny models, in PEFT's layout."""

import json

from safetensors.torch import save_file
from weights import matrix

# By family: the rank of each adapter and its target matrices in the language model.
ADAPTERS = {
    "qwen25vl": {
        "a": (8, ("q_proj", "v_proj")),
        "b": (16, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")),
    },
}
# Large enough that every adapter gives different answers.
STANDARD_DEVIATION = 0.2


def make_adapters(family, model, parent):
    """Writes the adapters of a family to directories in `parent`."""
    for letter, (rank, targets) in ADAPTERS.get(family, {}).items():
        tensors = {}
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if "language_model" not in name or module.rsplit(".", 1)[-1] not in targets:
                continue
            rows, columns = parameter.shape
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                weight_name = f"base_model.model.{module}.{part}.weight"
                tensors[weight_name] = matrix(
                    f"{family}/{letter}/{weight_name}", shape, STANDARD_DEVIATION
                )
        directory = parent / f"{family}-lora-{letter}"
        directory.mkdir(exist_ok=True)
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(targets),
        }
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(f"{family}: {len(tensors)} matrices of adapter {letter} in {directory}")
