//! Advice on common errors with which engines end.

/// Error messages of engines, with advice. The messages are those of vLLM 0.31 to 0.33, of PyTorch
/// and of the hub's client.
const KNOWN_ERRORS: [(&str, &str); 13] = [
    (
        "No available memory for the cache blocks",
        "the model fills the memory that the engine may take: \
         raise --gpu-memory-utilization behind --, or give each engine more GPUs \
         (--gpus-per-engine)",
    ),
    (
        "To serve at least one request with the model",
        "the KV cache has no room for one request of the longest kind: \
         lower --max-model-len behind --, or raise --gpu-memory-utilization there",
    ),
    (
        "Free memory on device",
        "something else is on that GPU, such as an engine that was not ended: \
         nvidia-smi shows it; or lower --gpu-memory-utilization behind --",
    ),
    (
        "CUDA out of memory",
        "the GPU's memory is full: lower --gpu-memory-utilization, --max-num-seqs or \
         --max-model-len behind --, or give each engine more GPUs (--gpus-per-engine)",
    ),
    (
        "Failed to infer device type",
        "this vLLM finds no device that it was built for: chiasm doctor says what it sees; \
         on a CPU it has to be vLLM's build for that",
    ),
    (
        "are not supported for now",
        "this vLLM does not know the model's architecture: a newer one may",
    ),
    (
        "Cannot find any model weights",
        "the model's folder has no weights: download it whole, \
         or give the folder that has its .safetensors",
    ),
    (
        "You are trying to access a gated repo",
        "ask for access on the model's page of the hub, and set HF_TOKEN",
    ),
    (
        "is not a valid model identifier",
        "MODEL is neither a folder on this machine nor an id of the hub",
    ),
    (
        "unrecognized arguments",
        "what stands behind -- goes to vllm, which does not know it: \
         Chiasm's own flags stand before --",
    ),
    (
        "NIXL is not available",
        "engines with roles hand prompts over by NIXL: \
         install nixl, and nixl-cu12 or nixl-cu13, in vLLM's environment, \
         or name another way (--kv-connector)",
    ),
    (
        "No module named 'chiasm_vllm",
        "engines that encode leave embeddings by Chiasm's plugin: \
         install it in vLLM's environment (docs/shared-memory.md), \
         or name another way (--ec-connector)",
    ),
    ("No space left on device", "a disk or /dev/shm is full: df shows which"),
];

/// Returns advice on the error in this line, if it is known.
pub(super) fn advice(line: &str) -> Option<&'static str> {
    KNOWN_ERRORS.iter().find(|(error, _)| line.contains(error)).map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_errors_have_advice() {
        for (line, expected) in [
            (
                "(EngineCore pid=7) ValueError: No available memory for the cache blocks. \
                 Try increasing",
                "--gpus-per-engine",
            ),
            (
                "ValueError: To serve at least one request with the model's max seq len (128000), \
                 (16.0 GiB KV cache is needed",
                "--max-model-len",
            ),
            (
                "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than \
                 the engine's budget",
                "nvidia-smi",
            ),
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "--max-num-seqs",
            ),
            (
                "RuntimeError: Failed to infer device type, please set the environment variable",
                "chiasm doctor",
            ),
            (
                "ValueError: Model architectures ['X'] are not supported for now. \
                 Supported architectures:",
                "architecture",
            ),
            ("RuntimeError: Cannot find any model weights with `/models/x`", ".safetensors"),
            ("OSError: You are trying to access a gated repo.", "HF_TOKEN"),
            ("RuntimeError: NIXL is not available", "--kv-connector"),
            (
                "ModuleNotFoundError: No module named 'chiasm_vllm.embedding_store'",
                "--ec-connector",
            ),
            ("vllm: error: unrecognized arguments: --engines 2", "before --"),
        ] {
            assert!(
                advice(line).is_some_and(|advice| advice.contains(expected)),
                "{line}: {:?}",
                advice(line)
            );
        }
        assert_eq!(advice("INFO Loading weights took 3.4 seconds"), None);
    }
}
