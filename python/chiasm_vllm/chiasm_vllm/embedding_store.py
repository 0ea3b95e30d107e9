"""A vLLM connector for embeddings: encoding engines write files, engines of the machine load them.

vLLM loads it by name (``ec_connector`` and ``ec_connector_module_path`` of
``--ec-transfer-config``), so no other module of this package imports it. The engine's scheduler
and each of its workers have an instance.

Tokens stay correct because a file is either complete or absent. The scheduler checks its header.
An item whose file is damaged or has another number of rows counts as not found, so this engine
encodes it. A worker can fail to load a file that the scheduler has found, because the file is gone
or memory is short. The item is then encoded in the same step: its request still has its data.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save
from vllm.distributed import get_pcp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from chiasm_vllm.embedding_folder import TENSOR, EmbeddingFolder, StoredFile

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# A child of the logger "vllm", whose handlers print these lines like the engine's own.
logger = init_logger("vllm.chiasm_vllm.embedding_store")


@dataclass
class StepItems(ECConnectorMetadata):
    """The scheduler's instructions to the workers for one step."""

    # The items to load, by identifier.
    loads: dict[str, "Load"] = field(default_factory=dict)
    # Identifiers without files. A worker that still has their embeddings writes them again.
    missing_files: list[str] = field(default_factory=list)
    # The step's own ``scheduled_encoder_inputs``: item indices by request. It is the same object
    # in the workers too, because both are pickled together. Items that are added here before the
    # encoder runs are encoded.
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, identifier: str) -> None:
        """Schedules an item that could not be loaded for encoding in this step."""
        load = self.loads[identifier]
        self.encoder_inputs.setdefault(load.request_id, []).append(load.index)


@dataclass(frozen=True)
class Load:
    """An item to load: its number of embeddings, and its index in a request that has its data."""

    rows: int
    request_id: str
    index: int


class EmbeddingStore(ECConnectorBase):
    """The connector. ``ec_connector_extra_config`` has ``folder``, and ``max_bytes`` to write."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = vllm_config.ec_transfer_config.ec_connector_extra_config
        folder = _parse_folder(settings)
        max_bytes = _parse_max_bytes(settings) if self.is_producer else 0
        self._folder = EmbeddingFolder(folder, max_bytes)
        self._logged_causes: set[object] = set()
        # The state of the step that is being scheduled: the request whose items vLLM looks up,
        # the identifiers found, and the items to load.
        self._current_request: Request | None = None
        self._found: set[str] = set()
        self._loads: dict[str, Load] = {}

    # In the scheduler.

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Notes the request and returns True: no transfer is ever in progress.

        vLLM calls this before it calls ``has_cache_item`` for the request's items, which receives
        only their identifiers.
        """
        self._current_request = request
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Returns True if the item need not be encoded.

        The worker loads it if vLLM then allocates space for it.
        """
        if self._find(identifier, self._expected_rows(identifier)) is None:
            self._found.discard(identifier)
            return False
        self._found.add(identifier)
        return True

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        # Uses the result of `has_cache_item` instead of another lookup: vLLM has already decided
        # by that result not to encode the item.
        identifier = request.mm_features[index].identifier
        if identifier in self._found:
            rows = request.get_num_encoder_embeds(index)
            self._loads[identifier] = Load(rows, request.request_id, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepItems:
        items = StepItems(self._loads, encoder_inputs=scheduler_output.scheduled_encoder_inputs)
        if self.is_producer:
            items.missing_files = self._missing_files(scheduler_output)
        self._current_request = None
        self._found = set()
        self._loads = {}
        return items

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Returns a producer's stored items of the request, with the sizes of their files.

        vLLM calls this after the workers have completed the request's last step, so the files they
        wrote exist.
        """
        if not self.is_producer:
            return False, None
        answer = {}
        for feature in request.mm_features:
            stored = self._find(feature.identifier, feature.mm_position.get_num_embeds())
            if stored is not None:
                # Another engine is about to load it.
                self._folder.touch(feature.identifier)
                answer[feature.identifier] = {"bytes": stored.bytes}
        return False, answer or None

    def _find(self, identifier: str, rows: int | None) -> StoredFile | None:
        """Returns the item's file, unless it has another number of embeddings than the item."""
        stored = self._folder.find(identifier)
        if stored is not None and rows is not None and stored.shape[0] != rows:
            message = "%s has %d embeddings and not %d. It is not used."
            self._warn_once("rows", message, identifier, stored.shape[0], rows)
            return None
        return stored

    def _expected_rows(self, identifier: str) -> int | None:
        if self._current_request is not None:
            for feature in self._current_request.mm_features:
                if feature.identifier == identifier:
                    return feature.mm_position.get_num_embeds()
        return None

    def _missing_files(self, scheduler_output: "SchedulerOutput") -> list[str]:
        """Returns the items without files that this step does not encode.

        They are in the engine's own cache, and their files were retired. Items that a later step
        encodes are included too. No cache has them yet, so the workers ignore them.
        """
        missing = []
        for request in scheduler_output.scheduled_new_reqs:
            encoded = scheduler_output.scheduled_encoder_inputs.get(request.req_id, ())
            for index, feature in enumerate(request.mm_features):
                if index in encoded or feature.identifier in self._loads:
                    continue
                if self._find(feature.identifier, feature.mm_position.get_num_embeds()) is None:
                    missing.append(feature.identifier)
        return missing

    # In the workers.

    def start_save_caches(self, **kwargs: Any) -> None:
        encoder_cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
        for identifier in self._step_items().missing_files:
            if identifier in encoder_cache:
                self.save_caches(encoder_cache, identifier)
        if not self.is_consumer:
            self._cache_loads(encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Writes an encoded item.

        An error is logged and has one effect: the item is not in the folder.
        """
        if self.is_producer and _is_writer():
            embeddings = encoder_cache[mm_hash].detach()
            if self._is_stored(mm_hash, embeddings):
                self._folder.touch(mm_hash)
            else:
                self._write(mm_hash, embeddings)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Loads the step's items. The encoder, which runs after this, encodes the failed ones."""
        items = self._step_items()
        failures = [
            not self._load_into(encoder_cache, identifier, load.rows, _device())
            for identifier, load in items.loads.items()
        ]
        # All ranks run an encoder together.
        for identifier, has_failed in zip(items.loads, _any_rank(failures), strict=True):
            if has_failed:
                encoder_cache.pop(identifier, None)
                items.encode(identifier)

    def _cache_loads(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Caches views of the step's items, from which their files can be written again later.

        In an engine that only encodes, the scheduler now counts these items as cached, and nothing
        reads their embeddings. A view of the file is therefore enough.
        """
        for identifier, load in self._step_items().loads.items():
            self._load_into(encoder_cache, identifier, load.rows, "cpu")

    def _load_into(
        self, encoder_cache: dict[str, torch.Tensor], identifier: str, rows: int, device: str
    ) -> bool:
        """Loads an item unless it is cached. Returns True if it is in the cache now.

        Logs each kind of failure once.
        """
        if identifier in encoder_cache:
            return True
        try:
            embeddings = _load_first(self._folder.candidate_paths(identifier), device)
            if (
                embeddings.ndim != 2
                or embeddings.shape[0] != rows
                or not embeddings.is_floating_point()
            ):
                shape = tuple(embeddings.shape)
                raise ValueError(f"it has {shape} of {embeddings.dtype} and not {rows} embeddings")
        # Files raise OSError and SafetensorError, a lack of memory MemoryError and RuntimeError.
        except Exception as error:
            self._folder.remove_damaged(identifier, rows)
            message = "%s can't be loaded and is encoded where it is needed: %s."
            self._warn_once(type(error), message, identifier, error)
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
            self._warn_once(("write", cause), "Failed to store %s: %s.", identifier, error)

    def _step_items(self) -> StepItems:
        items = self._get_connector_metadata()
        assert isinstance(items, StepItems)
        return items

    def _warn_once(self, cause: object, message: str, *arguments: object) -> None:
        if cause not in self._logged_causes:
            self._logged_causes.add(cause)
            logger.warning(
                message + " Further failures of this kind are not logged here.", *arguments
            )


def _parse_folder(settings: dict[str, Any]) -> str:
    folder = settings.get("folder")
    if not isinstance(folder, str) or not folder.startswith("/"):
        raise ValueError(
            'EmbeddingStore needs "folder" in ec_connector_extra_config, an absolute path'
        )
    return folder


def _parse_max_bytes(settings: dict[str, Any]) -> int:
    max_bytes = settings.get("max_bytes")
    if not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ValueError(
            'EmbeddingStore needs "max_bytes" in ec_connector_extra_config, a number above 0'
        )
    return max_bytes


def _is_writer() -> bool:
    """Returns True in the one rank that writes.

    All ranks have the same embeddings, and only those of the first pipeline stage encode at all.
    """
    return get_tensor_model_parallel_rank() == 0 and get_pcp_group().rank_in_group == 0


def _device() -> str:
    device = current_platform.device_type
    if not current_platform.is_cuda_alike():
        return device
    # Without an index it would be the first device in each rank.
    return f"{device}:{current_platform.current_device()}"


def _any_rank(flags: list[bool]) -> list[bool]:
    """Returns each flag as True if it is True in any rank of this engine's first stage.

    All ranks must call this together.
    """
    if not flags:
        return flags
    reduced = torch.tensor(flags, dtype=torch.int32)
    for group in (get_tp_group(), get_pcp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(
                reduced, torch.distributed.ReduceOp.MAX, group=group.cpu_group
            )
    return [bool(flag) for flag in reduced.tolist()]


def _load_first(paths: list[Path], device: str) -> torch.Tensor:
    """Loads the first of ``paths`` that exists. Raises the errors of loading."""
    for path in paths:
        try:
            with gpu_sync_allowed():
                return load_file(path, device=device)[TENSOR]
        except FileNotFoundError:
            continue
    raise FileNotFoundError("it is gone although it was found a moment ago")
