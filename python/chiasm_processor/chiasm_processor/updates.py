"""vLLM's resolved prompt updates as plain data, and back."""

import torch
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from .messages import Update, runs, unrolled

# Each item is made by itself. Where a model numbers its items, vLLM looks for this number to write that of the prompt.
MADE_AS = 0


def to_plain(update: ResolvedPromptUpdate) -> Update:
    full, is_embed = update.content.full, update.content.is_embed
    mask = None if is_embed is None else runs(is_embed(full).tolist())
    return Update(update.mode.value, _plain_target(update.target), runs(full), mask)


def from_plain(update: Update, modality: str) -> ResolvedPromptUpdate:
    mask = None if update.is_embed is None else torch.tensor(unrolled(update.is_embed), dtype=torch.bool)
    details = PromptUpdateDetails(unrolled(update.full), None if mask is None else lambda _: mask)
    return ResolvedPromptUpdate(modality, MADE_AS, UpdateMode(update.mode), _target(update.target), details)


def _plain_target(target: list[int] | PromptIndex) -> list[int] | str | dict[str, list[int]]:
    if not isinstance(target, PromptIndex):
        return list(target)
    # They are functions, told apart by what they find: only a prefix looks at the tokens before it.
    find = target.get_match_index
    sequence = (find.__closure__ or [None])[0]
    if sequence is not None:
        return {"prefix": list(sequence.cell_contents)}
    return "start" if find([0]) == 0 else "end"


def _target(target: list[int] | str | dict[str, list[int]]) -> list[int] | PromptIndex:
    if isinstance(target, dict):
        return PromptIndexTargets.prefix(target["prefix"])
    if isinstance(target, str):
        return PromptIndexTargets.start() if target == "start" else PromptIndexTargets.end()
    return target
