"""Conversations of models whose renderer in vLLM is code and not the model's chat template."""

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from mistral_common.protocol.instruct.chunk import ImageURLChunk
from vllm.config import ModelConfig, ObservabilityConfig, ParallelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers import mistral
from vllm.tokenizers.registry import cached_tokenizer_from_config, tokenizer_args_from_config

from .messages import KnownItem, unrolled


class Conversations:
    """Writes conversations as ``vllm serve`` does for a model with this configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self.renderer_mode = tokenizer_args_from_config(config)[0]
        kind = RENDERER_REGISTRY.load_renderer_cls(self.renderer_mode)
        self._config = config
        self._renderer = None
        if not issubclass(kind, HfRenderer):
            # What a renderer looks at of a configuration that only engines have as a whole.
            parts = SimpleNamespace(model_config=config, parallel_config=ParallelConfig(), observability_config=ObservabilityConfig())
            self._renderer = kind(parts, cached_tokenizer_from_config(config))

    @property
    def are_written_here(self) -> bool:
        """Without that, they are written by the model's chat template, which frontends know themselves."""
        return self._renderer is not None

    @property
    def io_defaults(self) -> dict[str, dict[str, Any]]:
        """Of each modality, how files are read unless engine or request say otherwise."""
        if self.renderer_mode != "kimi_k3":
            return {}
        return import_module(type(self._renderer).__module__)._K3_MEDIA_IO_DEFAULTS

    def tokens(
        self, messages: list[dict[str, Any]], items: Sequence[KnownItem], settings: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """The prompt of a conversation in which media parts have an item's number for a ``uuid``, and no URL; and the numbers of the items,
        those of each modality as they follow each other in the prompt. Most renderers write a marker where an item goes; some write the
        item."""
        if self._renderer is None:
            raise ValueError("the model's chat template writes its conversations")
        tokenizer = self._renderer.get_tokenizer()
        is_mistral = isinstance(tokenizer, mistral.MistralTokenizer)
        request = ChatCompletionRequest(messages=_with_urls(messages) if is_mistral else messages, **settings)
        tools = request.tools and [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": is_mistral})
        if is_mistral:
            return _of_mistral(tokenizer, request, params.get_apply_chat_template_kwargs(), items), list(range(len(items)))
        _, prompt = self._renderer.render_messages(request.messages, params)
        # DeepSeek V4.1's answers to tools come in another order than they were called, with their images.
        order = [int(uuid) for of_modality in (prompt.get("multi_modal_uuids") or {}).values() for uuid in of_modality]
        prompt = self._renderer._tokenize_singleton_prompt(prompt, request.build_tok_params(self._config))
        return list(prompt["prompt_token_ids"]), order


def _of_mistral(
    tokenizer: mistral.MistralTokenizer, request: ChatCompletionRequest, kwargs: dict[str, Any], items: Sequence[KnownItem]
) -> list[int]:
    """Mistral's own tokenizer writes images itself, of their pixels: it is told what they are known to become."""
    if any(item.modality != "image" for item in items):
        raise ValueError("conversations that Mistral's tokenizer writes have images only")
    mistral.maybe_serialize_tool_calls(request)
    mistral.truncate_tool_call_ids(request)
    mistral.validate_request_params(request)

    def known(chunk: ImageURLChunk) -> SimpleNamespace:
        (update,) = items[int(chunk.get_url())].updates
        return SimpleNamespace(tokens=unrolled(update.full), image=None)

    encoder = tokenizer.instruct.image_encoder
    tokenizer.instruct.image_encoder = known if items else encoder
    try:
        return list(tokenizer.apply_chat_template(request.messages, **kwargs))
    finally:
        tokenizer.instruct.image_encoder = encoder


def _with_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with items' numbers for URLs, as Mistral's tokenizer wants to have some."""

    def with_url(part: Any) -> Any:
        if not isinstance(part, dict) or "uuid" not in part:
            return part
        return {"type": part["type"], part["type"]: {"url": part["uuid"]}}

    return [
        {**message, "content": [with_url(part) for part in message["content"]]} if isinstance(message.get("content"), list) else message
        for message in messages
    ]
