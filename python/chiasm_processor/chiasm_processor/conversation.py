"""Rendering of conversations by vLLM's code, for models that do not use their chat template."""

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

from .messages import KnownItem, from_runs


class ConversationRenderer:
    """The renderer that ``vllm serve`` uses for a model with this configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self.renderer_mode = tokenizer_args_from_config(config)[0]
        renderer_class = RENDERER_REGISTRY.load_renderer_cls(self.renderer_mode)
        self._config = config
        self._renderer = None
        if not issubclass(renderer_class, HfRenderer):
            # The parts that a renderer reads from a configuration. Only engines have a complete
            # one.
            parts = SimpleNamespace(
                model_config=config,
                parallel_config=ParallelConfig(),
                observability_config=ObservabilityConfig(),
            )
            self._renderer = renderer_class(parts, cached_tokenizer_from_config(config))

    @property
    def renders_by_code(self) -> bool:
        """True if vLLM's code renders conversations.

        Otherwise the model's chat template does, and the frontend applies it itself.
        """
        return self._renderer is not None

    @property
    def io_defaults(self) -> dict[str, dict[str, Any]]:
        """The settings for reading files, by modality, unless engine or request override them."""
        if self.renderer_mode != "kimi_k3":
            return {}
        return import_module(type(self._renderer).__module__)._K3_MEDIA_IO_DEFAULTS

    def render(
        self, messages: list[dict[str, Any]], items: Sequence[KnownItem], settings: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Renders a conversation.

        A media part has the number of its item as ``uuid``, and no URL.

        Returns the token ids of the prompt, and the numbers of the items in the order in which
        those of each modality occur in the prompt. Most renderers write a marker for an item; some
        write the item itself.
        """
        if self._renderer is None:
            raise ValueError("the model's chat template writes its conversations")
        tokenizer = self._renderer.get_tokenizer()
        is_mistral = isinstance(tokenizer, mistral.MistralTokenizer)
        request = ChatCompletionRequest(
            messages=_numbers_as_urls(messages) if is_mistral else messages, **settings
        )
        tools = request.tools and [tool.model_dump() for tool in request.tools]
        defaults = {"tools": tools, "tokenize": is_mistral}
        params = request.build_chat_params(None, "auto").with_defaults(defaults)
        if is_mistral:
            kwargs = params.get_apply_chat_template_kwargs()
            return _render_with_mistral(tokenizer, request, kwargs, items), list(range(len(items)))
        _, prompt = self._renderer.render_messages(request.messages, params)
        # DeepSeek V4.1 writes tool results, with their images, in another order than the calls.
        uuids_by_modality = prompt.get("multi_modal_uuids") or {}
        order = [int(uuid) for uuids in uuids_by_modality.values() for uuid in uuids]
        tokenization = request.build_tok_params(self._config)
        prompt = self._renderer._tokenize_singleton_prompt(prompt, tokenization)
        return list(prompt["prompt_token_ids"]), order


def _render_with_mistral(
    tokenizer: mistral.MistralTokenizer,
    request: ChatCompletionRequest,
    kwargs: dict[str, Any],
    items: Sequence[KnownItem],
) -> list[int]:
    """Renders a conversation with Mistral's own tokenizer, which writes images itself.

    The tokenizer would compute an image's tokens from its pixels. It gets the known tokens instead.
    """
    if any(item.modality != "image" for item in items):
        raise ValueError("conversations that Mistral's tokenizer writes have images only")
    mistral.maybe_serialize_tool_calls(request)
    mistral.truncate_tool_call_ids(request)
    mistral.validate_request_params(request)

    def encode_known_image(chunk: ImageURLChunk) -> SimpleNamespace:
        (update,) = items[int(chunk.get_url())].updates
        return SimpleNamespace(tokens=from_runs(update.full), image=None)

    encoder = tokenizer.instruct.image_encoder
    tokenizer.instruct.image_encoder = encode_known_image if items else encoder
    try:
        return list(tokenizer.apply_chat_template(request.messages, **kwargs))
    finally:
        tokenizer.instruct.image_encoder = encoder


def _numbers_as_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with items' numbers as URLs, because Mistral's tokenizer needs URLs."""

    def with_url(part: Any) -> Any:
        if not isinstance(part, dict) or "uuid" not in part:
            return part
        return {"type": part["type"], part["type"]: {"url": part["uuid"]}}

    def with_urls(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [with_url(part) for part in content]}

    return [with_urls(message) for message in messages]
