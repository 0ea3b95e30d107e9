"""A connector of vLLM for embeddings between engines of one machine: who encodes leaves files, others load them.

vLLM loads it by name (``ec_connector`` and ``ec_connector_module_path`` of ``--ec-transfer-config``), so nothing else
of this package imports it. An instance lives in the engine's scheduler and one in each of its workers.

What keeps tokens right: a file is complete or not there; the scheduler looks into its header, and an item whose file
is damaged or of another length counts as not found, so that this engine encodes it. A file that the worker then can't
load although the scheduler has found it, as it is gone or memory is short, is encoded in the same step: its request
has the item's data, too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save
from vllm.distributed import get_pcp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from chiasm_vllm.embedding_folder import TENSOR, EmbeddingFolder, Stored

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Below "vllm", whose handlers print it like the engine's own lines.
logger = init_logger("vllm.chiasm_vllm.embedding_store")


@dataclass
class StepItems(ECConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    # Identifiers to load.
    loads: dict[str, "Load"] = field(default_factory=dict)
    # Identifiers whose files are gone. A worker that still has their embeddings writes them again.
    gone: list[str] = field(default_factory=list)
    # The step's own ``scheduled_encoder_inputs``: indices of items by request. In the workers it is the same object, too,
    # as both are pickled together. So items that are added here before the encoder runs are encoded.
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, identifier: str) -> None:
        """Has an item encoded in this step that could not be loaded."""
        load = self.loads[identifier]
        self.encoder_inputs.setdefault(load.request_id, []).append(load.index)


@dataclass(frozen=True)
class Load:
    """The number of embeddings that an item must have, and its data: the item's index in a request."""

    rows: int
    request_id: str
    index: int


class EmbeddingStore(ECConnectorBase):
    """``ec_connector_extra_config`` has ``folder``, and for those that write ``max_bytes``."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._folder = EmbeddingFolder(_folder_of(settings), _max_bytes_of(settings) if self.is_producer else 0)
        self._logged: set[object] = set()
        # Of the step that is being scheduled: the request that is asked about, what was found, what is to be loaded.
        self._asking: Request | None = None
        self._found: set[str] = set()
        self._loads: dict[str, Load] = {}

    # In the scheduler.

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Nothing is ever on its way. vLLM calls this before it asks for a request's items, of which
        ``has_cache_item`` is told no more than their identifiers."""
        self._asking = request
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item need not be encoded. If so, and it gets a place, the worker will load it."""
        if self._stored(identifier, self._rows_of(identifier)) is None:
            self._found.discard(identifier)
            return False
        self._found.add(identifier)
        return True

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        # What was answered above decides, not another look: vLLM has decided by it that it does not encode.
        identifier = request.mm_features[index].identifier
        if identifier in self._found:
            self._loads[identifier] = Load(request.get_num_encoder_embeds(index), request.request_id, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepItems:
        items = StepItems(self._loads, encoder_inputs=scheduler_output.scheduled_encoder_inputs)
        if self.is_producer:
            items.gone = self._gone(scheduler_output)
        self._asking, self._found, self._loads = None, set(), {}
        return items

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Of a producer: those of the request's items that are in the folder, with the bytes of their files.

        vLLM calls this when the request's last step has come back from the workers, so what they wrote is there.
        """
        if not self.is_producer:
            return False, None
        answer = {}
        for feature in request.mm_features:
            stored = self._stored(feature.identifier, feature.mm_position.get_num_embeds())
            if stored is not None:
                # Somebody is about to be sent for it.
                self._folder.touch(feature.identifier)
                answer[feature.identifier] = {"bytes": stored.bytes}
        return False, answer or None

    def _stored(self, identifier: str, rows: int | None) -> Stored | None:
        """What is in the folder, unless it has another number of embeddings than the item."""
        stored = self._folder.find(identifier)
        if stored is not None and rows is not None and stored.shape[0] != rows:
            message = "%s has %d embeddings and not %d. It is not used."
            self._warn_once("rows", message, identifier, stored.shape[0], rows)
            return None
        return stored

    def _rows_of(self, identifier: str) -> int | None:
        if self._asking is not None:
            for feature in self._asking.mm_features:
                if feature.identifier == identifier:
                    return feature.mm_position.get_num_embeds()
        return None

    def _gone(self, scheduler_output: "SchedulerOutput") -> list[str]:
        """Items without files that this step does not encode: the engine has them in its own cache, and the file was
        retired. What is encoded in a later step is in no cache now, and the workers leave it."""
        gone = []
        for request in scheduler_output.scheduled_new_reqs:
            encoded = scheduler_output.scheduled_encoder_inputs.get(request.req_id, ())
            for index, feature in enumerate(request.mm_features):
                if index in encoded or feature.identifier in self._loads:
                    continue
                if self._stored(feature.identifier, feature.mm_position.get_num_embeds()) is None:
                    gone.append(feature.identifier)
        return gone

    # In the workers.

    def start_save_caches(self, **kwargs: Any) -> None:
        encoder_cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
        for identifier in self._step_items().gone:
            if identifier in encoder_cache:
                self.save_caches(encoder_cache, identifier)
        if not self.is_consumer:
            self._note_loads(encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Writes an item that was encoded. What goes wrong is logged: then the item is not in the folder, that is
        all."""
        if self.is_producer and _is_writer():
            embeddings = encoder_cache[mm_hash].detach()
            if self._is_stored(mm_hash, embeddings):
                self._folder.touch(mm_hash)
            else:
                self._write(mm_hash, embeddings)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Loads the step's items. Leaves those that can't be loaded to the encoder, which runs after this."""
        items = self._step_items()
        failed = [
            not self._load_into(encoder_cache, identifier, load.rows, _device())
            for identifier, load in items.loads.items()
        ]
        # An encoder is run by all ranks together.
        for identifier, has_failed in zip(items.loads, _any_rank(failed), strict=True):
            if has_failed:
                encoder_cache.pop(identifier, None)
                items.encode(identifier)

    def _note_loads(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """In an engine that encodes only, the scheduler now believes that these are cached here, and nothing of the
        engine will look at them. So a view of the file is enough, from which it can be written again later."""
        for identifier, load in self._step_items().loads.items():
            self._load_into(encoder_cache, identifier, load.rows, "cpu")

    def _load_into(self, encoder_cache: dict[str, torch.Tensor], identifier: str, rows: int, device: str) -> bool:
        """Loads an item unless it is cached. Returns whether it is in the cache now; logs each kind of failure once."""
        if identifier in encoder_cache:
            return True
        try:
            embeddings = _load_first(self._folder.places(identifier), device)
            if embeddings.ndim != 2 or embeddings.shape[0] != rows or not embeddings.is_floating_point():
                raise ValueError(f"it has {tuple(embeddings.shape)} of {embeddings.dtype} and not {rows} embeddings")
        # Files raise OSError and SafetensorError, a lack of memory MemoryError and RuntimeError.
        except Exception as error:
            self._folder.remove_damaged(identifier, rows)
            self._warn_once(type(error), "%s can't be loaded and is encoded where it is needed: %s.", identifier, error)
            return False
        encoder_cache[identifier] = embeddings
        self._folder.touch(identifier)
        return True

    def _is_stored(self, identifier: str, embeddings: torch.Tensor) -> bool:
        stored = self._folder.find(identifier)
        return stored is not None and stored.shape == tuple(embeddings.shape)

    def _write(self, identifier: str, embeddings: torch.Tensor) -> None:
        try:
            with gpu_sync_allowed():
                embeddings = embeddings.cpu().contiguous()
            self._folder.write(identifier, save({TENSOR: embeddings}))
        # Files raise OSError, a lack of memory MemoryError and RuntimeError.
        except (OSError, MemoryError, RuntimeError) as error:
            cause = error.errno if isinstance(error, OSError) else type(error)
            self._warn_once(("write", cause), "Storing %s met an error: %s.", identifier, error)

    def _step_items(self) -> StepItems:
        items = self._get_connector_metadata()
        assert isinstance(items, StepItems)
        return items

    def _warn_once(self, cause: object, message: str, *arguments: object) -> None:
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(message + " More of this kind are not logged here.", *arguments)


def _folder_of(settings: dict[str, Any]) -> str:
    folder = settings.get("folder")
    if not isinstance(folder, str) or not folder.startswith("/"):
        raise ValueError('EmbeddingStore needs "folder" in ec_connector_extra_config, an absolute path')
    return folder


def _max_bytes_of(settings: dict[str, Any]) -> int:
    max_bytes = settings.get("max_bytes")
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ValueError('EmbeddingStore needs "max_bytes" in ec_connector_extra_config, a number above 0')
    return max_bytes


def _is_writer() -> bool:
    """All ranks have the same embeddings. Only those of the first pipeline stage encode at all."""
    return get_tensor_model_parallel_rank() == 0 and get_pcp_group().rank_in_group == 0


def _device() -> str:
    device = current_platform.device_type
    # Without a number it would be the first device for each rank.
    return f"{device}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else device


def _any_rank(flags: list[bool]) -> list[bool]:
    """Returns each flag, or True if it is True in any rank of this engine's first stage. All ranks call it together."""
    if not flags:
        return flags
    reduced = torch.tensor(flags, dtype=torch.int32)
    for group in (get_tp_group(), get_pcp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return [bool(flag) for flag in reduced.tolist()]


def _load_first(places: list[Path], device: str) -> torch.Tensor:
    """Loads the first of ``places`` that exists. Raises whatever loading raises."""
    for path in places:
        try:
            with gpu_sync_allowed():
                return load_file(path, device=device)[TENSOR]
        except FileNotFoundError:
            continue
    raise FileNotFoundError("it is gone although it was found a moment ago")
