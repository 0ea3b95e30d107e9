"""Runs `vllm bench serve` against a server: completions, chats, and chats with pictures.

usage: vllm_bench.py URL MODEL, with the URL without /v1

MODEL is the folder of the model's tokenizer and the model's name. One run omits it and gets both
from the server. All runs share a process, because importing vLLM is slow.
"""

import asyncio
import sys

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

url, model = sys.argv[1:]
PROMPTS = 8
OUTPUT_TOKENS = 16
MODEL_FLAGS = ["--model", model]
COMMON_FLAGS = ["--base-url", url, "--num-prompts", str(PROMPTS), "--ignore-eos"]
COMMON_FLAGS += [
    "--max-concurrency",
    "4",
    "--seed",
    "1",
    "--ready-check-timeout-sec",
    "10",
    "--disable-tqdm",
]
COMMON_FLAGS += ["--random-input-len", "32", "--random-output-len", str(OUTPUT_TOKENS)]
COMPLETIONS = ["--backend", "openai", "--endpoint", "/v1/completions"]
CHATS = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
PICTURES = [
    "--random-mm-base-items-per-request",
    "1",
    "--random-mm-limit-mm-per-prompt",
    '{"image": 1, "video": 0}',
]
PICTURES += ["--random-mm-bucket-config", "{(112, 112, 1): 1.0}"]


def bench(name, *flags):
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    results = asyncio.run(main_async(parser.parse_args([*COMMON_FLAGS, *flags])))
    assert results["completed"] == PROMPTS and not results.get("failed"), (name, results)
    assert results["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS, (name, results)
    assert results["mean_ttft_ms"] > 0 and results["mean_itl_ms"] >= 0, (name, results)
    return results["total_input_tokens"]


bench("completions", *COMPLETIONS, "--dataset-name", "random")
without_pictures = bench("chats", *MODEL_FLAGS, *CHATS, "--dataset-name", "random")
with_pictures = bench("pictures", *MODEL_FLAGS, *CHATS, "--dataset-name", "random-mm", *PICTURES)
# A picture of 112x112 takes 16 tokens of a prompt, and two for its markers.
assert with_pictures >= without_pictures + 16 * PROMPTS, (without_pictures, with_pictures)
print("ok")
