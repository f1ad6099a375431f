"""`SavedChats`: the conversations that the chat command saves automatically.

They are the JSON files of `ChatSession.save`: messages, exact token ids and model. They lie in
$XDG_STATE_HOME/radixserve/chats/MODEL, by default below ~/.local/state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from radixserve.errors import InvalidRequest

if TYPE_CHECKING:
    from radixserve.api.chat import ChatSession

MAX_SAVED = 100  # conversations per model; the oldest are deleted
_MAX_LISTED = 10


class SavedChat(NamedTuple):
    """A saved conversation."""

    path: Path
    saved_at: float  # time.time()
    num_turns: int
    question: str  # the first message


class SavedChats:
    """The folder of a model's conversations. Only its owner can read it. A file is written whole or
    not at all."""

    def __init__(self, model: str) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        name = re.sub(r"[^\w.-]+", "-", model).strip("-.") or "model"
        self.folder = Path(state).expanduser() / "radixserve" / "chats" / name[-100:]
        self._numbers = itertools.count(1)

    def new_path(self) -> Path:
        """A path for a new conversation. Deletes the oldest conversations beyond MAX_SAVED."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._newest_first()[MAX_SAVED - 1 :]:
            path.unlink(missing_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return self.folder / f"{stamp}-{os.getpid()}-{next(self._numbers)}.json"

    def save(self, chat: ChatSession, path: Path) -> None:
        """Save a conversation; if it has no turns, delete its file. Raises OSError."""
        if not len(chat.tokens):
            path.unlink(missing_ok=True)
            return
        part = path.with_suffix(".part")
        try:
            chat.save(part)
            part.chmod(0o600)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def listed(self) -> list[SavedChat]:
        """The last conversations, newest first. Files that do not contain a conversation are left
        out."""
        chats = (_read(path) for path in self._newest_first())
        return list(itertools.islice((chat for chat in chats if chat is not None), _MAX_LISTED))

    def numbered(self, text: str) -> SavedChat:
        """The conversation with a number in `listed`, from 1, given as text. Raises
        InvalidRequest."""
        chats = self.listed()
        if not chats:
            raise InvalidRequest("no conversation with this model is saved")
        with contextlib.suppress(ValueError):
            if 1 <= int(text) <= len(chats):
                return chats[int(text) - 1]
        raise InvalidRequest(f"/resume takes a number from 1 to {len(chats)}, not {text!r}")

    def _newest_first(self) -> list[Path]:
        dated = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                dated.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(dated, reverse=True)]


def _read(path: Path) -> SavedChat | None:
    try:
        turns = json.loads(path.read_text(encoding="utf-8"))["turns"]
        question = str(turns[0]["messages"][0]["content"])
        return SavedChat(path, path.stat().st_mtime, len(turns), question)
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
