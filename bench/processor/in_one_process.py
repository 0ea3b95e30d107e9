"""vLLM's frontend code in one process, as Dynamo's chat processor runs it: `in_one_process.py MODEL MEDIA`.

The calls are those of `dynamo/frontend/vllm_processor.py` and `prepost.py` of the package ai-dynamo 1.6.1, in their order and with
their settings: the request is checked, its media are loaded, the prompt is rendered and tokenized, `process_for_engine_async` runs
the processor with the cache `processor_only`, `InputProcessor.process_inputs` makes the engine's request, and the tensors are
written into a segment of shared memory as `MmKwargsShmSender` does it. That module itself imports what vLLM 0.32 has under other
names, so it can't be taken. What comes before (HTTP) and after (routing, the way to a worker) is left out.
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

from chat import Chats
from turns import take

# Beside `turns`, which has made this folder known.
import segments  # isort: skip
from parent import run  # isort: skip


class Frontend:
    def __init__(self, model: str) -> None:
        config = ModelConfig(model=model, tokenizer_mode="auto", config_format="auto", trust_remote_code=False)
        # As tensors are to be sent each time, Dynamo has vLLM keep them.
        config.get_multimodal_config().mm_processor_cache_type = "processor_only"  # type: ignore[assignment]
        engine = VllmConfig(model_config=config, load_config=LoadConfig(load_format="dummy"), cache_config=CacheConfig())
        self._processor = InputProcessor(engine)

    async def process(self, body: dict[str, Any]) -> EngineCoreRequest:
        renderer = self._processor.renderer
        request = ChatCompletionRequest.model_validate(body)
        _, prompt = await renderer.render_messages_async(request.messages, request.build_chat_params(None, "auto"))
        rendered: dict[str, Any] = {**prompt}
        if "prompt_token_ids" not in rendered:
            tokens = renderer.get_tokenizer()(rendered["prompt"], add_special_tokens=request.add_special_tokens).input_ids
            rendered["prompt_token_ids"] = list(tokens)
        inputs = await renderer.process_for_engine_async(cast(TokensPrompt, rendered), time.time())
        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=request.max_tokens)
        made = self._processor.process_inputs(f"request {time.time_ns()}", inputs, sampling, GENERATION_TASKS)
        for feature in made.mm_features or ():
            segment, _ = segments.write("msgpack", feature.data)
            segments.remove(segment)
        return made


def main(model: str, media: str) -> None:
    chats, frontend, loop = Chats(Path(media)), Frontend(model), asyncio.new_event_loop()
    take(
        chats.chat,
        lambda body: loop.run_until_complete(frontend.process(body)),
        lambda made: len(made.prompt_token_ids),
    )


if __name__ == "__main__":
    run(main, *sys.argv[1:])
