"""vLLM's frontend code in one process, as in Dynamo's chat processor: `in_one_process.py MODEL
MEDIA`.

The calls are those of `dynamo/frontend/vllm_processor.py` and `prepost.py` of ai-dynamo 1.6.1, in
their order and with their settings. The request is checked, its media are loaded, and the prompt is
rendered and tokenized. `process_for_engine_async` runs the processor with the cache
`processor_only`, and `InputProcessor.process_inputs` makes the engine's request. The tensors are
written into a segment of shared memory as by `MmKwargsShmSender`. Dynamo's module itself imports
names that vLLM 0.32 does not have. HTTP and the way to a worker are left out.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, cast

from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import GENERATION_TASKS
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from media import Requests
from turns import serve

# From the folder that `turns` has added to the path.
import segments  # isort: skip
from parent import run  # isort: skip


class Frontend:
    def __init__(self, model: str) -> None:
        settings = {"tokenizer_mode": "auto", "config_format": "auto", "trust_remote_code": False}
        config = ModelConfig(model=model, **settings)
        # Dynamo lets vLLM keep tensors, because they are sent each time.
        multimodal = config.get_multimodal_config()
        multimodal.mm_processor_cache_type = "processor_only"  # type: ignore[assignment]
        load, cache = LoadConfig(load_format="dummy"), CacheConfig()
        engine = VllmConfig(model_config=config, load_config=load, cache_config=cache)
        self._processor = InputProcessor(engine)

    async def process(self, body: dict[str, Any]) -> EngineCoreRequest:
        renderer = self._processor.renderer
        request = ChatCompletionRequest.model_validate(body)
        parameters = request.build_chat_params(None, "auto")
        _, prompt = await renderer.render_messages_async(request.messages, parameters)
        rendered: dict[str, Any] = {**prompt}
        if "prompt_token_ids" not in rendered:
            tokenize = renderer.get_tokenizer()
            special = request.add_special_tokens
            tokens = tokenize(rendered["prompt"], add_special_tokens=special).input_ids
            rendered["prompt_token_ids"] = list(tokens)
        tokens_prompt = cast(TokensPrompt, rendered)
        inputs = await renderer.process_for_engine_async(tokens_prompt, time.time())
        delta = RequestOutputKind.DELTA
        sampling = SamplingParams(output_kind=delta, max_tokens=request.max_tokens)
        name = f"request {time.time_ns()}"
        processed = self._processor.process_inputs(name, inputs, sampling, GENERATION_TASKS)
        for feature in processed.mm_features or ():
            segment, _ = segments.write("msgpack", feature.data)
            segments.remove(segment)
        return processed


def main(model: str, media: str) -> None:
    requests, frontend, loop = Requests(Path(media)), Frontend(model), asyncio.new_event_loop()
    serve(
        requests.chat,
        lambda body: loop.run_until_complete(frontend.process(body)),
        lambda processed: len(processed.prompt_token_ids),
    )


if __name__ == "__main__":
    run(main, *sys.argv[1:])
