"""A model's processor as vLLM's own frontend runs it, one item at a time and with prompts that have no data."""

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

from .conversation import Conversations
from .limits import Limits
from .messages import Expanded, KnownItem, Placeholder, runs
from .updates import from_plain

UNTIMED = TimingContext(enabled=False)


class NotSupported(Exception):
    """A model that can't be served this way."""


class _Flags(FlexibleArgumentParser):
    """Passes over flags that are the HTTP server's alone."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, _ = super().parse_known_args(args, namespace)
        return known, []


# How a video begins that is a list of JPEG files, as its URL has it; no container does.
FRAMES = b"data:video/jpeg;base64,"


class Connector(MediaConnector):
    """Loads what it is given in place of what a URL names, by the rules of each modality."""

    def __init__(self, data: bytes, io_kwargs: dict[str, dict[str, Any]]) -> None:
        super().__init__(media_io_kwargs=io_kwargs)
        self._data = data

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        if isinstance(media_io, VideoMediaIO) and self._data.startswith(FRAMES):
            return media_io.load_base64("video/jpeg", self._data[len(FRAMES) :].decode("ascii"))
        return media_io.load_bytes(self._data)


class Processor:
    """The processor of a model that is served with these flags of ``vllm serve``; they change tensors and prompts."""

    def __init__(self, flags: Sequence[str], limits: Limits = Limits()) -> None:
        self._limits = limits
        parser = EngineArgs.add_cli_args(_Flags())
        self.config = EngineArgs.from_cli_args(parser.parse_args(list(flags))).create_model_config()
        self.conversations = Conversations(self.config)
        kind = next(self._unsupported(), None)
        if kind:
            raise NotSupported(f"{', '.join(self.config.architectures)} {kind}")
        # A text model's conversations may have to be written, too.
        self.vllm = MULTIMODAL_REGISTRY.create_processor(self.config) if self.config.is_multimodal_model else None

    def _unsupported(self) -> Iterator[str]:
        if not self.config.is_multimodal_model and not self.conversations.are_written_here:
            yield "takes no images, videos or audio"
        if self.config.is_encoder_decoder:
            yield "has an encoder with a prompt of its own, which is not supported"
        if self.config.runner_type != "generate":
            yield "generates no text"
        if not self.conversations.are_written_here and self.conversations.renderer_mode != "hf":
            yield "has a tokenizer that is made by code, which is not supported"

    def model_class(self) -> Any:
        """The model itself, as a class: it says how items are written in a conversation."""
        return get_model_cls(self.config)

    def folders(self) -> list[Path]:
        """Where the model's own files are: its directory, or its part of the hub's cache."""
        named = {Path(name) for name in (self.config.model, self.config.tokenizer) if name}
        inside = {path.resolve() for folder in named if folder.is_dir() for path in folder.iterdir() if path.is_symlink()}
        return sorted({folder for folder in named if folder.is_dir()} | {path.parent for path in inside if path.exists()})

    def load(self, modality: str, data: bytes, io_kwargs: Mapping[str, Any]) -> Any:
        """What a file is decoded to."""
        self._limits.check_file(modality, data)
        connector = Connector(data, self._io_kwargs(io_kwargs))
        if modality == "video":
            loaded = connector.fetch_video("", video_processor=get_video_processor_cls_name(self.config))
        else:
            loaded = getattr(connector, f"fetch_{modality}")("")
        self._limits.check_loaded(modality, loaded)
        return loaded

    def item(
        self, modality: str, data: bytes, processor_kwargs: Mapping[str, Any], io_kwargs: Mapping[str, Any]
    ) -> tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]:
        """The tensors of a file, and the ways to write it in a prompt."""
        modalities = [modality]
        if modality == "video" and processor_kwargs.get("use_audio_in_video"):
            # They are written together. The sound is made as an item of its own, too.
            modalities.append("audio")
        media = {part: [self.load(part, data, io_kwargs)] for part in modalities}
        made = _Made()
        inputs = ProcessorInputs(
            prompt=[],
            mm_data_items=self.vllm.info.parse_mm_data(media),
            # Or the data would be hashed, which nobody looks at.
            mm_uuid_items={part: [part] for part in modalities},
            hf_processor_mm_kwargs=processor_kwargs,
            cache=made,
        )
        self.vllm._cached_apply_hf_processor(inputs, UNTIMED)
        return made.of(modality)

    def prompt(self, token_ids: list[int], items: Sequence[KnownItem], processor_kwargs: Mapping[str, Any]) -> Expanded:
        """The prompt with its items written out."""
        places: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(item.modality, []).append(place)
        known = _Known()
        inputs = ProcessorInputs(
            prompt=token_ids,
            mm_data_items=self.vllm.info.parse_mm_data({modality: [None] * len(of) for modality, of in places.items()}, validate=False),
            mm_uuid_items={modality: [f"item {place}" for place in of] for modality, of in places.items()},
            hf_processor_mm_kwargs=processor_kwargs,
            cache=known,
        )
        for modality, names in self._names(inputs).items():
            for name, place in zip(names, places[modality], strict=True):
                known.updates[name] = [from_plain(update, modality) for update in items[place].updates]
        expanded = self.vllm.apply(inputs, UNTIMED)
        placeholders: list[Placeholder | None] = [None] * len(items)
        for modality, found in expanded["mm_placeholders"].items():
            for place, at in zip(places[modality], found, strict=True):
                mask = None if at.is_embed is None else runs(at.is_embed.tolist())
                placeholders[place] = Placeholder(at.offset, at.length, mask)
        return Expanded(list(expanded["prompt_token_ids"]), placeholders)

    def chat(
        self,
        messages: list[dict[str, Any]],
        items: Sequence[KnownItem],
        settings: dict[str, Any],
        processor_kwargs: Mapping[str, Any],
    ) -> Expanded:
        """The prompt of a conversation, with its items written out."""
        token_ids, order = self.conversations.tokens(messages, items, settings)
        if sorted(order) != list(range(len(items))):
            raise ValueError("the conversation is written without some of its images, videos or recordings")
        if not items:
            return Expanded(token_ids, [])
        expanded = self.prompt(token_ids, [items[number] for number in order], processor_kwargs)
        places = dict(zip(order, expanded.placeholders, strict=True))
        return Expanded(expanded.token_ids, [places[number] for number in range(len(items))])

    def _names(self, inputs: ProcessorInputs) -> Mapping[str, Sequence[str]]:
        """What vLLM will call the items; the settings have a part in that."""
        if hasattr(self.vllm, "_get_mm_hashes"):
            return self.vllm._get_mm_hashes(inputs)
        # Until 0.31.
        info = self.vllm.info
        return inputs.get_mm_hashes(info.model_id, info.ctx.get_mm_config().mm_hasher_algorithm)

    def _io_kwargs(self, of_request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Of each modality, a request's settings over the engine's, as vLLM merges them: of a video, one rate replaces another."""
        of_engine = self.config.get_multimodal_config().media_io_kwargs
        merged = merge_media_io_kwargs(of_engine, dict(of_request))
        return merge_media_io_kwargs(self.conversations.io_defaults, merged) or {}


class _Cache(BaseMultiModalProcessorCache):
    """What vLLM asks of a cache beside its items."""

    def clear_cache(self) -> None:
        pass

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        pass

    def make_stats(self, *, delta: bool = False) -> Any:
        raise NotImplementedError


class _Made(_Cache):
    """Has nothing, and keeps what is put into it."""

    def __init__(self) -> None:
        self._items: list[tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]] = []

    def is_cached_item(self, mm_hash: str) -> bool:
        return False

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        self._items.append(mm_item)
        return mm_item

    def of(self, modality: str) -> tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]:
        (made,) = (made for made in self._items if made[1][0].modality == modality)
        return made


class _Known(_Cache):
    """Has every item, without its data."""

    def __init__(self) -> None:
        self.updates: dict[str, list[ResolvedPromptUpdate]] = {}

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.updates

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        return None, self.updates[mm_hash]
