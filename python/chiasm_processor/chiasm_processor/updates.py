"""Conversion between vLLM's resolved prompt updates and plain data."""

import torch
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from .messages import PromptUpdate, from_runs, to_runs

# The index of every item when it is made, because each is made separately. Where a model numbers
# its items, vLLM searches for this number and writes that of the prompt.
ITEM_INDEX = 0


def to_plain(update: ResolvedPromptUpdate) -> PromptUpdate:
    full = update.content.full
    is_embed = update.content.is_embed
    mask = None if is_embed is None else to_runs(is_embed(full).tolist())
    return PromptUpdate(update.mode.value, _plain_target(update.target), to_runs(full), mask)


def from_plain(update: PromptUpdate, modality: str) -> ResolvedPromptUpdate:
    mask = None
    if update.is_embed is not None:
        mask = torch.tensor(from_runs(update.is_embed), dtype=torch.bool)
    is_embed = None if mask is None else lambda _: mask
    details = PromptUpdateDetails(from_runs(update.full), is_embed)
    target = _resolve_target(update.target)
    return ResolvedPromptUpdate(modality, ITEM_INDEX, UpdateMode(update.mode), target, details)


def _plain_target(target: list[int] | PromptIndex) -> list[int] | str | dict[str, list[int]]:
    if not isinstance(target, PromptIndex):
        return list(target)
    # An index is a function, recognized by its results. Only that of a prefix is a closure over
    # tokens, those of the prefix.
    find = target.get_match_index
    prefix = (find.__closure__ or [None])[0]
    if prefix is not None:
        return {"prefix": list(prefix.cell_contents)}
    return "start" if find([0]) == 0 else "end"


def _resolve_target(
    target: list[int] | str | dict[str, list[int]],
) -> list[int] | PromptIndex:
    if isinstance(target, dict):
        return PromptIndexTargets.prefix(target["prefix"])
    if isinstance(target, str):
        return PromptIndexTargets.start() if target == "start" else PromptIndexTargets.end()
    return target
