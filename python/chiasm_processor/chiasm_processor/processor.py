"""A model's processor as in vLLM's own frontend, for single items and for prompts without data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.connector import merge_media_io_kwargs
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.processor import ResolvedPromptUpdate
from vllm.transformers_utils.processor import get_video_processor_cls_name
from vllm.utils.argparse_utils import FlexibleArgumentParser

from .conversation import ConversationRenderer
from .limits import Limits
from .messages import ExpandedPrompt, KnownItem, Placeholder, to_runs
from .updates import from_plain

UNTIMED = TimingContext(enabled=False)

# The tensors of an item, and the ways to write it in a prompt.
ItemAndUpdates = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]


class NotSupported(Exception):
    """The model cannot be served by this package."""


class _EngineFlagParser(FlexibleArgumentParser):
    """A parser that ignores the flags of the HTTP server."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, _ = super().parse_known_args(args, namespace)
        return known, []


# The beginning of a video that is a list of JPEG files, from its data URL. No container begins so.
FRAME_LIST_PREFIX = b"data:video/jpeg;base64,"


class BytesConnector(MediaConnector):
    """A connector that loads given bytes in place of a URL, by the rules of each modality."""

    def __init__(self, data: bytes, io_kwargs: dict[str, dict[str, Any]]) -> None:
        super().__init__(media_io_kwargs=io_kwargs)
        self._data = data

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        if isinstance(media_io, VideoMediaIO) and self._data.startswith(FRAME_LIST_PREFIX):
            frames = self._data[len(FRAME_LIST_PREFIX) :].decode("ascii")
            return media_io.load_base64("video/jpeg", frames)
        return media_io.load_bytes(self._data)


class Processor:
    """The processor of a model. It depends on these flags of ``vllm serve``."""

    def __init__(self, flags: Sequence[str], limits: Limits = Limits()) -> None:
        self.limits = limits
        parser = EngineArgs.add_cli_args(_EngineFlagParser())
        self.config = EngineArgs.from_cli_args(parser.parse_args(list(flags))).create_model_config()
        self.conversations = ConversationRenderer(self.config)
        reason = next(self._unsupported_reasons(), None)
        if reason:
            raise NotSupported(f"{', '.join(self.config.architectures)} {reason}")
        # None for a text model, whose conversations may still need rendering.
        self.vllm_processor = (
            MULTIMODAL_REGISTRY.create_processor(self.config)
            if self.config.is_multimodal_model
            else None
        )

    def _unsupported_reasons(self) -> Iterator[str]:
        renders_by_code = self.conversations.renders_by_code
        if not self.config.is_multimodal_model and not renders_by_code:
            yield "takes no images, videos or audio"
        if self.config.is_encoder_decoder:
            yield "has an encoder with a prompt of its own, which is not supported"
        if self.config.runner_type != "generate":
            yield "generates no text"
        if not renders_by_code and self.conversations.renderer_mode != "hf":
            yield "has a tokenizer that is made by code, which is not supported"

    def model_class(self) -> Any:
        """Returns the model's class, which defines how items are written in a conversation."""
        return get_model_cls(self.config)

    def model_folders(self) -> list[Path]:
        """Returns the folders of the model's files: its directory, or its part of the hub cache."""
        names = {Path(name) for name in (self.config.model, self.config.tokenizer) if name}
        folders = {folder for folder in names if folder.is_dir()}
        files = (path for folder in folders for path in folder.iterdir())
        targets = {path.resolve() for path in files if path.is_symlink()}
        return sorted(folders | {target.parent for target in targets if target.exists()})

    def load(self, modality: str, data: bytes, io_kwargs: Mapping[str, Any]) -> Any:
        """Returns the decoded content of a file."""
        self.limits.check_file(modality, data)
        connector = BytesConnector(data, self._merge_io_kwargs(io_kwargs))
        if modality == "video":
            video_processor = get_video_processor_cls_name(self.config)
            loaded = connector.fetch_video("", video_processor=video_processor)
        else:
            loaded = getattr(connector, f"fetch_{modality}")("")
        self.limits.check_loaded(modality, loaded)
        return loaded

    def make_item(
        self,
        modality: str,
        data: bytes,
        processor_kwargs: Mapping[str, Any],
        io_kwargs: Mapping[str, Any],
    ) -> ItemAndUpdates:
        """Returns the tensors of a file, and the ways to write the item in a prompt."""
        modalities = [modality]
        if modality == "video" and processor_kwargs.get("use_audio_in_video"):
            # Both are written in one place of the prompt. The sound is also made as a separate
            # item.
            modalities.append("audio")
        media = {part: [self.load(part, data, io_kwargs)] for part in modalities}
        return self.process_loaded(media, modality, processor_kwargs)

    def process_loaded(
        self,
        media: Mapping[str, Sequence[Any]],
        modality: str,
        processor_kwargs: Mapping[str, Any],
    ) -> ItemAndUpdates:
        """Returns the tensors of one loaded item, and the ways to write it in a prompt.

        ``media`` has the item, and perhaps one of another modality that belongs to it.
        """
        cache = _RecordingCache()
        inputs = ProcessorInputs(
            prompt=[],
            mm_data_items=self.vllm_processor.info.parse_mm_data(media),
            # Without identifiers, vLLM would hash the data, and the hashes are not used.
            mm_uuid_items={part: [part] for part in media},
            hf_processor_mm_kwargs=processor_kwargs,
            cache=cache,
        )
        self.vllm_processor._cached_apply_hf_processor(inputs, UNTIMED)
        return cache.recorded_item(modality)

    def audio_io_kwargs(self) -> dict[str, Any]:
        """Returns the settings for reading recordings, of requests without any."""
        return self._merge_io_kwargs({}).get("audio", {})

    def expand_prompt(
        self,
        token_ids: list[int],
        items: Sequence[KnownItem],
        processor_kwargs: Mapping[str, Any],
    ) -> ExpandedPrompt:
        """Expands the items of a prompt."""
        # The numbers of the items of each modality.
        numbers_by_modality: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            numbers_by_modality.setdefault(item.modality, []).append(number)
        no_data = {
            modality: [None] * len(numbers) for modality, numbers in numbers_by_modality.items()
        }
        cache = _KnownItemCache()
        inputs = ProcessorInputs(
            prompt=token_ids,
            mm_data_items=self.vllm_processor.info.parse_mm_data(no_data, validate=False),
            mm_uuid_items={
                modality: [f"item {number}" for number in numbers]
                for modality, numbers in numbers_by_modality.items()
            },
            hf_processor_mm_kwargs=processor_kwargs,
            cache=cache,
        )
        for modality, hashes in self._item_hashes(inputs).items():
            for mm_hash, number in zip(hashes, numbers_by_modality[modality], strict=True):
                updates = items[number].updates
                cache.updates[mm_hash] = [from_plain(update, modality) for update in updates]
        expanded = self.vllm_processor.apply(inputs, UNTIMED)
        placeholders: list[Placeholder | None] = [None] * len(items)
        for modality, ranges in expanded["mm_placeholders"].items():
            for number, range_ in zip(numbers_by_modality[modality], ranges, strict=True):
                mask = None if range_.is_embed is None else to_runs(range_.is_embed.tolist())
                placeholders[number] = Placeholder(range_.offset, range_.length, mask)
        return ExpandedPrompt(list(expanded["prompt_token_ids"]), placeholders)

    def expand_chat(
        self,
        messages: list[dict[str, Any]],
        items: Sequence[KnownItem],
        settings: dict[str, Any],
        processor_kwargs: Mapping[str, Any],
    ) -> ExpandedPrompt:
        """Renders a conversation and expands its items."""
        token_ids, order = self.conversations.render(messages, items, settings)
        if sorted(order) != list(range(len(items))):
            raise ValueError(
                "the conversation is written without some of its images, videos or recordings"
            )
        if not items:
            return ExpandedPrompt(token_ids, [])
        ordered_items = [items[number] for number in order]
        expanded = self.expand_prompt(token_ids, ordered_items, processor_kwargs)
        placeholders = dict(zip(order, expanded.placeholders, strict=True))
        return ExpandedPrompt(
            expanded.token_ids, [placeholders[number] for number in range(len(items))]
        )

    def _item_hashes(self, inputs: ProcessorInputs) -> Mapping[str, Sequence[str]]:
        """Returns vLLM's names of the items, by modality. They depend on the settings."""
        if hasattr(self.vllm_processor, "_get_mm_hashes"):
            return self.vllm_processor._get_mm_hashes(inputs)
        # vLLM 0.31 and older.
        info = self.vllm_processor.info
        return inputs.get_mm_hashes(info.model_id, info.ctx.get_mm_config().mm_hasher_algorithm)

    def _merge_io_kwargs(self, request_kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Merges a request's settings by modality over the engine's, as vLLM does.

        For a video, one frame rate setting replaces another.
        """
        engine_kwargs = self.config.get_multimodal_config().media_io_kwargs
        merged = merge_media_io_kwargs(engine_kwargs, dict(request_kwargs))
        return merge_media_io_kwargs(self.conversations.io_defaults, merged) or {}


class _Cache(BaseMultiModalProcessorCache):
    """The methods that vLLM calls on a cache besides those for its items."""

    def clear_cache(self) -> None:
        pass

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def make_stats(self, *, delta: bool = False) -> Any:
        raise NotImplementedError


class _RecordingCache(_Cache):
    """An empty cache that records the items put into it."""

    def __init__(self) -> None:
        self._items: list[ItemAndUpdates] = []

    def is_cached_item(self, mm_hash: str) -> bool:
        return False

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        self._items.append(mm_item)
        return mm_item

    def recorded_item(self, modality: str) -> ItemAndUpdates:
        """Returns the only item of a modality."""
        (item,) = (item for item in self._items if item[1][0].modality == modality)
        return item


class _KnownItemCache(_Cache):
    """A cache that contains every item, without its data."""

    def __init__(self) -> None:
        self.updates: dict[str, list[ResolvedPromptUpdate]] = {}

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.updates

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        return None, self.updates[mm_hash]
