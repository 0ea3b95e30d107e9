"""Runs `vllm bench serve` against a server: completions, chats, and chats with pictures. One process, as importing vLLM is slow.

usage: vllm_bench.py URL MODEL, with the URL without /v1. MODEL is the folder with the model's tokenizer and the model's name. One
run omits it and gets both from the server.
"""

import asyncio
import sys

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

url, model = sys.argv[1:]
PROMPTS, TOKENS = 8, 16
NAMED = ["--model", model]
COMMON = ["--base-url", url, "--num-prompts", str(PROMPTS), "--ignore-eos"]
COMMON += ["--max-concurrency", "4", "--seed", "1", "--ready-check-timeout-sec", "10", "--disable-tqdm"]
COMMON += ["--random-input-len", "32", "--random-output-len", str(TOKENS)]
COMPLETIONS = ["--backend", "openai", "--endpoint", "/v1/completions"]
CHATS = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
PICTURES = ["--random-mm-base-items-per-request", "1", "--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}']
PICTURES += ["--random-mm-bucket-config", "{(112, 112, 1): 1.0}"]


def bench(name, *flags):
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    told = asyncio.run(main_async(parser.parse_args([*COMMON, *flags])))
    assert told["completed"] == PROMPTS and not told.get("failed"), (name, told)
    assert told["total_output_tokens"] == PROMPTS * TOKENS, (name, told)
    assert told["mean_ttft_ms"] > 0 and told["mean_itl_ms"] >= 0, (name, told)
    return told["total_input_tokens"]


bench("completions", *COMPLETIONS, "--dataset-name", "random")
text = bench("chats", *NAMED, *CHATS, "--dataset-name", "random")
seen = bench("pictures", *NAMED, *CHATS, "--dataset-name", "random-mm", *PICTURES)
# A picture of 112x112 takes 16 tokens of a prompt, and two for its marks.
assert seen >= text + 16 * PROMPTS, (text, seen)
print("ok")
