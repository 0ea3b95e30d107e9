"""The requests that all sides get: one item each, and a question that no other request has."""

import base64
from pathlib import Path
from typing import Any

from media import KINDS, numbered

MODEL = "processor"
# A few steps: what comes before the first token is to be measured.
ANSWER_TOKENS = 4
MIME = {"image": "image/jpeg", "video": "video/mp4"}


class Chats:
    """Makes requests about the files of a folder. Numbers are the caller's to choose."""

    def __init__(self, folder: Path) -> None:
        self._files = {kind: (folder / kind).read_bytes() for kind in KINDS}

    def file(self, kind: str, item: int) -> bytes:
        """The item of this number: another file for each, all of them alike."""
        return numbered(self._files[kind], item)

    def chat(self, kind: str, item: int, question: int) -> dict[str, Any]:
        modality, _ = KINDS[kind]
        url = f"data:{MIME[modality]};base64,{base64.b64encode(self.file(kind, item)).decode()}"
        # The number always has eight digits, so that all questions are of equally many tokens.
        text = f"Question {question:08}: what is to be seen here?"
        part = f"{modality}_url"
        content = [{"type": part, part: {"url": url}}, {"type": "text", "text": text}]
        return {"model": MODEL, "max_tokens": ANSWER_TOKENS, "messages": [{"role": "user", "content": content}]}
