"""`radixserve chat` with pictures: paths in messages, /image, what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixserve.commands.chat_pictures import picture_file, said, take_pictures
from tests.images.vision_checkpoints import as_file, make_vision_checkpoint, picture
from tests.test_chat_command import talk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_vision_checkpoint(tmp_path_factory.mktemp("llava"), "llava")
    for number, name in enumerate(("a.png", "my photo.png")):
        (made / name).write_bytes(as_file(picture(number)))
    (made / "not one.png").write_text("text")
    return made


def test_files_in_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, spaced = folder / "a.png", folder / "my photo.png"
    escaped = str(spaced).replace(" ", "\\ ")
    for word in (f"'{spaced}'", f'"{spaced}"', escaped, spaced.as_uri()):
        assert take_pictures(f"What is {word} ?") == ([spaced], "What is  ?")
    assert take_pictures(f"{plain} {escaped} compare") == ([plain, spaced], "compare")
    for text in ("it's a.png", "no/such.png", str(folder / "config.json"), "don't \\", 'a "b'):
        assert take_pictures(text) == ([], text)
    monkeypatch.setenv("HOME", str(folder))
    assert picture_file("~/a.png") == plain
    assert said([{"type": "image", "image": "x"}, {"type": "text", "text": "What?"}]) == (
        "[picture] What?"
    )


def test_a_conversation_with_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown, usage = talk(
        monkeypatch,
        f"{folder / 'a.png'} What is this?",  # no command, though it begins with /
        "And now?",
        f"/image {folder / 'my photo.png'}",
        "Which one is larger?",
        f"/image {folder / 'not one.png'}",
        "/image",
        "/tree",
        "/undo",
        f"/save {tmp_path / 'chat.json'}",
        flags=[str(folder)],
    )
    assert len(usage) == 3
    assert usage[1][0] >= usage[0][2] - 1  # nothing of the picture is computed again
    assert usage[2][2] - usage[1][2] > 16  # another picture's tokens
    notes = [line for line in shown if line.startswith("picture: ")]
    assert [line.split(",")[0] for line in notes] == ["picture: a.png", "picture: my photo.png"]
    text = "\n".join(shown)
    assert "cannot be decoded" in text or "not a picture" in text
    assert "a file is missing: /image FILE" in text
    digest = notes[0].rsplit(" ", 1)[1]
    assert f"[picture {digest}" in text  # in the tree
    assert "taken back: [picture " in text
    assert "cannot be written as JSON" in text


def test_a_model_of_text_says_so(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    shown, _ = talk(monkeypatch, f"/image {folder / 'a.png'}")
    assert any("takes text only" in line for line in shown)
