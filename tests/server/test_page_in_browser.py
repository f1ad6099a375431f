"""The page in headless Chromium, with real clicks and keys: pip install playwright, and chromium
from Debian's packages (apt-get install chromium).

With RADIXSERVE_SCREENSHOTS=FOLDER pictures of it are written there.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
playwright_api: Any = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright && apt-get install chromium"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("apt-get install chromium", allow_module_level=True)

from radixserve import Runtime, SamplingParams  # noqa: E402
from radixserve.server.gate.tenants import Tenants  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402
from tests.server.test_tenants import KEYS, as_, write  # noqa: E402

expect = playwright_api.expect
SCREENSHOTS = os.environ.get("RADIXSERVE_SCREENSHOTS")
TIMEOUT = 60_000  # ms


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        found = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        expect.set_options(timeout=TIMEOUT)
        yield found
        found.close()


@pytest.fixture(scope="module")
def small() -> Iterator[Runtime]:
    """A pool that a few prompts fill."""
    with Runtime("demo", num_pages=640, max_running_requests=16) as runtime:
        yield runtime


@pytest.fixture
def served(small: Runtime) -> Iterator[LocalServer]:
    small.flush_cache()
    with LocalServer(small) as served:
        yield served


@pytest.fixture
def page(browser: Any, served: LocalServer) -> Iterator[Any]:
    yield from open_page(browser, served)


def open_page(browser: Any, served: LocalServer, **options: Any) -> Iterator[Any]:
    """Fails where the page logs an error, such as one of its content security policy."""
    options.setdefault("viewport", {"width": 1360, "height": 1000})
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: m.type == "error" and errors.append(m.text))
    page.goto(served.url)
    yield page
    context.close()
    assert [text for text in errors if not re.search("401|503", text)] == []


def ask(page: Any, text: str, *, n: int = 1, tokens: int = 12) -> None:
    """Send a prompt by clicks and wait for the answer's end."""
    page.get_by_label("Prompt", exact=True).fill(text)
    page.get_by_label("Continuations").fill(str(n))
    page.get_by_label("Tokens", exact=True).fill(str(tokens))
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#try-state")).to_contain_text("complete")


def items(page: Any) -> Any:
    return page.get_by_role("treeitem")


def test_pictures_in_a_chat(browser: Any, tmp_path: Path) -> None:
    """Chosen, pasted and dropped ones; the tree names them by digest and size."""
    from tests.images.vision_checkpoints import as_file, make_vision_checkpoint, picture

    folder = make_vision_checkpoint(tmp_path / "model", "llava")
    files = [base64.b64encode(as_file(picture(number))).decode() for number in range(3)]
    (tmp_path / "photo.png").write_bytes(base64.b64decode(files[0]))
    transfer = """(data) => {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], "other.png", { type: "image/png" }));
        return transfer;
    }"""
    paste = """(transfer) => document.querySelector("#say-text").dispatchEvent(
        new ClipboardEvent("paste", { clipboardData: transfer, cancelable: true }))"""
    with Runtime(folder, num_pages=4000) as runtime, LocalServer(runtime) as served:
        for page in open_page(browser, served):
            page.goto(f"{served.url}#chat")
            page.locator("#say-length").evaluate("(field) => { field.value = 8; }")
            expect(page.locator("#say-picture")).to_be_visible()
            page.locator("#say-files").set_input_files(tmp_path / "photo.png")
            waiting = page.locator("#say-pictures img")
            expect(waiting).to_have_count(1)
            page.evaluate(paste, page.evaluate_handle(transfer, files[1]))
            expect(waiting).to_have_count(2)
            page.get_by_role("button", name="Remove photo.png").click()
            expect(waiting).to_have_count(1)
            dropped = {"dataTransfer": page.evaluate_handle(transfer, files[2])}
            page.dispatch_event("#chat-panel", "drop", dropped)
            expect(waiting).to_have_count(2)
            page.locator("#say-text").fill("Which one is larger?")
            page.locator("#say-send").click()
            expect(page.locator("#say-state")).to_contain_text("Complete")
            expect(waiting).to_have_count(0)
            expect(page.locator("#turns li.user img")).to_have_count(2)
            expect(page.locator("#tree")).to_contain_text("[picture ")
            page.locator("#say-text").fill("And now?")
            page.locator("#say-send").click()
            expect(page.locator("#turns li.assistant .line")).to_have_count(2)
            expect(page.locator("#say-state")).to_contain_text("Complete")
            page.reload()  # the chat is kept, its pictures are not
            page.locator("#chats .name").first.click()
            expect(page.locator("#turns")).to_contain_text("2 pictures, sent before")
        assert runtime.cache_stats()["pictures"]["encoded"] == 2  # type: ignore[typeddict-item]


def test_send_branch_find_and_open(page: Any, small: Runtime) -> None:
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#tree-empty")).to_be_visible()
    page.get_by_label("in a session").check()
    ask(page, "How do I sort a list?")
    expect(items(page)).to_have_count(1)
    expect(items(page).first).to_contain_text("How do I sort a list?")
    expect(items(page).first).to_contain_text("page-")  # the session's name
    expect(page.locator("#try-state")).to_contain_text("0 cached")

    page.get_by_role("button", name="Branch from here").first.click()
    expect(page.locator("#context")).to_contain_text("Goes on from answer 1")
    ask(page, "What is a lambda?", n=3)
    expect(page.locator("#answers > li")).to_have_count(4)
    stats = small.cache_stats()
    assert stats["reused_tokens"] > stats["computed_tokens"]  # the history was not computed again
    expect(items(page)).not_to_have_count(1)
    expect(page.locator("#counts")).to_have_text("0 + 0")  # the tree grows no more
    parent = page.locator("#tree [aria-expanded]").first
    expect(parent).to_have_attribute("aria-expanded", "true")
    shown = items(page).count()
    parent.click()
    expect(parent).to_have_attribute("aria-expanded", "false")
    expect(items(page)).not_to_have_count(shown)
    expect(page.locator("#node")).to_contain_text("positions 0 to")
    parent.click()
    expect(items(page)).to_have_count(shown)

    page.get_by_label("Text to look for").fill("How do I sort a dictionary?")
    page.get_by_role("button", name="Find").click()
    found = page.locator("#found")
    expect(found).to_contain_text("cached. What is cached goes on with")
    expect(found.locator("mark")).to_contain_text("How do I sort a")
    expect(found.locator(".stop")).to_contain_text("dict")
    expect(page.locator("#tree .path")).not_to_have_count(0)
    page.get_by_label("Text to look for").fill("<script>alert(1)</script>")
    page.get_by_role("button", name="Find").click()
    expect(found).to_contain_text("<script>")
    page.get_by_role("button", name="Clear").click()
    expect(found).to_be_hidden()
    expect(page.locator("#hit-rate")).to_contain_text("%")


def test_an_eviction_is_seen(page: Any, small: Runtime) -> None:
    ask(page, "The first prompt is the first victim", tokens=4)
    expect(page.locator("#victims li").first).to_contain_text("The first prompt")
    expect(page.locator("#victims li").first).to_contain_text("least recently used")
    before = small.cache_stats()["evicted_tokens"]
    small.generate([list(range(300 + 40 * i, 600 + 40 * i)) for i in range(4)], progress=False)
    gone = small.cache_stats()["evicted_tokens"] - before
    assert gone > 0
    expect(page.locator("#evicted-note")).to_contain_text("went just now")
    total = f"{small.cache_stats()['evicted_tokens']:,}"
    expect(page.locator("#evicted")).to_have_text(total)
    expect(page.locator("#tree")).not_to_contain_text("The first prompt")
    page.locator("#pages").hover(position={"x": 5, "y": 5})
    expect(page.locator("#page-info")).to_contain_text("Page 0:")
    page.get_by_label("Text to look for").fill("The first prompt is the first victim")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#found")).to_contain_text("0 of")


@contextlib.contextmanager
def busy(runtime: Runtime, num_requests: int = 64) -> Iterator[None]:
    """Requests run, and others wait, until it is left."""
    things = ("list", "dictionary", "string", "file", "tuple", "set", "queue", "path")
    verbs = ("open", "copy", "read", "close")
    prompts = [
        [{"role": "user", "content": f"How do I {verbs[at % 4]} a {things[at // 4 % 8]}?"}]
        for at in range(num_requests)
    ]
    is_left = threading.Event()

    def wait(_: Any, logits: Any) -> Any:
        """Steps are slow, so that the page sees them on any machine."""
        is_left.wait(0.2)
        return logits

    params = SamplingParams(max_tokens=200, ignore_eos=True)
    slow = replace(params, logits_processors=[wait])
    with runtime.submit(prompts, [slow, *[params] * (num_requests - 1)]):
        try:
            yield
        finally:
            is_left.set()


def test_requests_as_they_run(page: Any, small: Runtime) -> None:
    with busy(small):
        rows = page.locator("#requests tr")
        expect(rows).not_to_have_count(0)
        expect(rows.first).to_contain_text("generates")
        expect(page.locator("#requests")).to_contain_text("waits for its turn")
        expect(page.locator("#owners")).to_contain_text(re.compile("shared by several [1-9]"))
        expect(page.locator("#tree .chip.use").first).to_contain_text("used by")
        page.get_by_label("Prompt", exact=True).fill("One that comes last")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#try-state")).to_have_text("Stopped.")
    expect(page.locator("#requests-empty")).to_be_visible()


def test_the_three_way_switch(page: Any) -> None:
    page.get_by_role("button", name="Run the script").click()
    columns = page.locator(".cache")
    expect(columns).to_have_count(3, timeout=4 * TIMEOUT)
    computed = []
    for name in ("radix", "hash", "off"):
        text = page.locator(f".cache[data-cache={name}] > p").inner_text()
        found = re.search(r"([\d,]+) tokens computed", text)
        assert found is not None
        computed.append(int(found[1].replace(",", "")))
        assert not re.search(r"\d s\b", text)  # seconds of so small a model are noise
    assert computed == sorted(set(computed))
    expect(page.locator("#compare-state")).to_contain_text("The answers are the same")


def test_keys_only(page: Any) -> None:
    """Tab and arrows, no pointer; what has the focus is seen."""
    ask(page, "How do I copy a file?", n=2)
    ask(page, "How do I copy a list?")  # answers may be empty; two prompts always branch
    expect(items(page)).not_to_have_count(0)
    page.reload()
    expect(items(page)).not_to_have_count(0)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(8):
        if page.evaluate("document.activeElement.getAttribute('role')") == "treeitem":
            break
        page.keyboard.press("Tab")
    focused = page.locator("#tree li:focus")
    expect(focused).to_have_count(1)
    assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("aria-level", "2")
    expect(focused).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowLeft")  # closes it, or goes to the one above
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("aria-level", "1")
    page.locator("#pages").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#page-info")).to_contain_text("Page 1:")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea')]"
        ".filter(e => !e.labels?.length && !e.ariaLabel && !e.textContent.trim()).length"
    )
    assert unnamed == 0


def test_dark_and_light(browser: Any, served: LocalServer) -> None:
    for scheme, is_dark in (("dark", True), ("light", False)):
        for page in open_page(browser, served, color_scheme=scheme, reduced_motion="reduce"):
            background = "getComputedStyle(document.body).backgroundColor"
            first = page.evaluate(background)
            assert (sum(map(int, re.findall(r"\d+", first))) < 300) == is_dark
            theme = page.locator("#theme")
            theme.click()
            theme.click()
            expect(theme).to_contain_text("Dark")
            assert sum(map(int, re.findall(r"\d+", page.evaluate(background)))) < 300
            page.reload()
            expect(page.locator("#theme")).to_contain_text("Dark")


def test_nothing_is_asked_while_it_is_hidden_or_paused(page: Any) -> None:
    expect(page.locator("#state")).to_have_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    page.wait_for_timeout(300)
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []
    page.get_by_role("button", name="Go on").click()
    page.wait_for_timeout(1500)
    assert asked
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(600)
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []


def test_a_tenant_types_its_key_and_sees_its_own_part(
    browser: Any, small: Runtime, tmp_path: Path
) -> None:
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    tenants = Tenants.load(write(tmp_path / "keys", "\n".join(lines)))
    small.flush_cache()
    with LocalServer(small, tenants) as served:
        body = {"prompt": "A secret of bob about walruses", "max_tokens": 2}
        served.post("/v1/completions", body, headers=as_("bob"))
        for page in open_page(browser, served):
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            expect(page.locator("#state")).to_contain_text("key is needed")
            expect(page.get_by_label("API key")).to_be_focused()
            expect(page.locator("#locked")).to_contain_text("your part of the cache")
            for part in ("main", "footer", "nav"):
                expect(page.locator(part)).to_be_hidden()
            page.wait_for_timeout(1000)
            assert sum("snapshot" in url for url in asked) <= 1
            page.get_by_label("API key").fill("a wrong one, long enough")
            page.get_by_role("button", name="Use it").click()
            expect(page.locator("#state")).to_contain_text("not known")
            page.get_by_label("API key").fill(KEYS["ann"])
            page.keyboard.press("Enter")
            expect(page.locator("#state")).to_have_text("live")
            ask(page, "How do I read a file?")
            expect(page.locator("#tree")).to_contain_text("How do I read a file?")
            assert "walrus" not in page.content()
            expect(page.locator("#victims-empty")).to_contain_text("admin")
            expect(page.locator("#owners")).to_contain_text("free, or not yours")
            page.get_by_role("button", name="Forget the key").click()
            expect(page.locator("#state")).to_contain_text("key is needed")
            page.get_by_label("API key").fill(KEYS["root"])
            page.keyboard.press("Enter")
            expect(page.locator("#tree")).to_contain_text("walruses")
            expect(page.locator("#tree")).to_contain_text("namespace ann")


def say(page: Any, text: str, *, tokens: int = 12) -> None:
    """Send a message of a chat by keys and wait for the answer's end."""
    if not page.get_by_label("Longest answer").is_visible():
        page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Longest answer").fill(str(tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#say-state")).to_contain_text("Complete")


def open_chat(page: Any) -> None:
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Message", exact=True)).to_be_enabled()
    expect(page.locator("#find-chat")).to_be_enabled()  # the model's template is known


def facts(page: Any) -> list[tuple[int, int]]:
    """The cached and computed tokens of each answer shown."""
    texts = page.locator("#turns li.assistant .line").all_inner_texts()
    matches = [re.search(r"= ([\d,]+) cached \+ ([\d,]+) computed", text) for text in texts]
    return [tuple(int(n.replace(",", "")) for n in match.groups()) for match in matches if match]  # type: ignore[misc]


def test_a_chat_with_forks_is_kept(page: Any) -> None:
    open_chat(page)
    expect(page.locator("#turns-empty")).to_contain_text("Fork a chat anywhere")
    say(page, "How do I sort a list?")
    say(page, "What is a lambda?")
    (_, first), (cached, computed) = facts(page)
    assert cached >= first > computed > 0  # the second prompt begins with all of the first
    for kind in (
        "cached",
        "computed",
        "generated",
    ):  # the colours of the bar stand before the figures
        expect(page.locator(f"#turns li.assistant .swatch.c-{kind}")).to_have_count(2)
    expect(page.locator("#tree .path")).not_to_have_count(0)

    page.get_by_role("button", name="Fork here").first.click()
    expect(page.locator("#turns > li")).to_have_count(2)
    expect(page.locator("#ways")).to_contain_text("What is a lambda?")
    say(page, "What is a generator?")
    assert facts(page)[1][0] >= first  # the fork shares what stands before
    expect(page.locator("#chat-note")).to_contain_text("3 answers in 2 forks")
    expect(page.locator(".switch")).to_contain_text("fork 2 of 2")
    expect(page.locator(".forks")).to_contain_text("What is a lambda?")
    page.get_by_role("button", name="Fork before").click()
    expect(page.locator("#turns")).to_contain_text("What is a lambda?")
    expect(page.locator("#turns")).not_to_contain_text("What is a generator?")

    page.reload()
    page.get_by_role("button", name="How do I sort a list?", exact=True).click()
    expect(page.locator("#turns > li")).to_have_count(4)
    expect(page.locator("#chat-note")).to_contain_text("3 answers in 2 forks")
    page.get_by_role("button", name="Answer again").last.click()
    expect(page.locator("#say-state")).to_contain_text("Complete")
    expect(page.locator(".switch").last).to_contain_text("fork 2 of 2")
    page.get_by_role("button", name="Edit").last.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("What is a lambda?")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#turns > li")).to_have_count(0)
    page.get_by_role("button", name="Delete the chat How do I sort a list?").click()
    expect(page.locator("#chats > li")).to_have_count(0)
    page.reload()
    expect(page.locator("#find-chat")).to_be_enabled()
    expect(page.locator("#chats > li")).to_have_count(0)


def test_a_stopped_answer_is_kept_and_goes_on(page: Any, small: Runtime) -> None:
    open_chat(page)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Longest answer").fill("500")
    page.get_by_label("Message", exact=True).fill("How do I sort a list?")
    with busy(small, 2):
        page.get_by_role("button", name="Send").click()
        said = page.locator("#turns li.assistant .said")
        expect(said).to_contain_text(re.compile(r"\w"))
        expect(page.locator("#turns li.assistant .line")).to_contain_text("computed")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#say-state")).to_contain_text("what was said so far is kept")
    half = said.inner_text()
    expect(page.locator("#turns li.assistant")).to_contain_text("stopped: this much is kept")
    page.reload()
    page.get_by_role("button", name="How do I sort a list?", exact=True).click()
    expect(said).to_have_text(half)
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#say-state")).to_contain_text("Complete")
    assert len(said.inner_text()) > len(half)
    assert said.inner_text().startswith(half.split("`")[0].rstrip())


def test_a_chat_shows_markup_as_text(page: Any) -> None:
    """In messages, answers and titles, from the server and from what the browser has kept."""
    open_chat(page)
    attack = "<img src=x onerror=document.title='taken'>"
    say(page, attack)
    chat = {
        "id": "old", "title": attack, "at": 1, "system": "", "nextId": 3, "leaf": 2,
        "messages": {
            "1": {"id": 1, "parent": None, "role": "user", "content": attack},
            "2": {"id": 2, "parent": 1, "role": "assistant", "reasoning": attack, "end": "stop",
                  "content": f"{attack} `{attack}`\n```html\n{attack}\n```\n**{attack}**"},
        },
    }  # fmt: skip
    page.evaluate("chat => localStorage.setItem(chatKey(chat.id), JSON.stringify(chat))", chat)
    page.reload()
    expect(page.locator("#chats > li")).to_have_count(2)
    page.locator("#chats .name").last.click()
    expect(page.locator("#turns pre")).to_have_text(attack)
    expect(page.locator("#turns code")).to_have_text(attack)
    expect(page.locator("#chat-title")).to_have_text(attack)
    assert page.locator("img").count() == 0
    assert page.title() == "radixserve"


def test_chats_of_a_tenant_are_listed_for_its_key_alone(
    browser: Any, small: Runtime, tmp_path: Path
) -> None:
    lines = [f"{name} {key}" for name, key in KEYS.items()]
    tenants = Tenants.load(write(tmp_path / "keys", "\n".join(lines)))
    with LocalServer(small, tenants) as served:
        for page in open_page(browser, served):
            for name, num_chats in (("ann", 0), ("bob", 0), ("ann", 1)):
                page.get_by_label("API key").fill(KEYS[name])
                page.keyboard.press("Enter")
                open_chat(page)
                expect(page.locator("#chats > li")).to_have_count(num_chats)
                if not num_chats:
                    say(page, f"A secret of {name}", tokens=2)
                page.get_by_role("button", name="Forget the key").click()
                expect(page.locator("#state")).to_contain_text("key is needed")


def test_fields_that_are_left_empty_are_the_models(page: Any) -> None:
    open_chat(page)
    page.get_by_text("Settings", exact=True).click()
    expect(page.locator("#sampling")).to_have_text(
        "Left empty: temperature 0.3 (generation_config.json)."
    )
    sent: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request))
    say(page, "How do I sort a list?", tokens=2)
    page.get_by_role("link", name="Cache").click()
    ask(page, "The json module", tokens=2)
    bodies = [request.post_data_json for request in sent if "completions" in request.url]
    assert len(bodies) == 2
    assert not any("temperature" in body for body in bodies)


# The width of an input's placeholder beyond that of its box, in pixels.
CUT = """field => {
  const style = getComputedStyle(field), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return pen.measureText(field.placeholder).width - room;
}"""


def test_no_placeholder_is_cut(browser: Any, served: LocalServer) -> None:
    for width in (1360, 390):
        for page in open_page(browser, served, viewport={"width": width, "height": 900}):
            open_chat(page)
            page.get_by_text("Settings", exact=True).click()
            for link in ("Cache", "Chat"):
                page.get_by_role("link", name=link).click()
                for field in page.locator("input[placeholder]:visible").all():
                    assert field.evaluate(CUT) <= 0, field.get_attribute("placeholder")


def test_no_chat_without_a_template_and_the_page_waits_for_the_model(
    browser: Any, small: Runtime
) -> None:
    with LocalServer(None) as served:
        for page in open_page(browser, served):
            expect(page.locator("#state")).to_contain_text("load")
            expect(page.locator("main")).to_be_hidden()
            served.server.set_runtime(small)
            expect(page.locator("#state")).to_have_text("live")
            open_chat(page)
            page.route("**/tokenizer_info", lambda route: route.fulfill(json={}))
            page.reload()
            expect(page.locator("#turns-empty")).to_contain_text("no chat template")
            expect(page.get_by_label("Message", exact=True)).to_be_disabled()


def test_a_model_without_a_tokenizer(browser: Any) -> None:
    with Runtime("random:tiny-llama", num_pages=64) as runtime, LocalServer(runtime) as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.get_by_role("link", name="Chat").click()
        expect(page.locator("#turns-empty")).to_contain_text("no chat template")
        expect(page.locator("#state")).to_have_text("live")
        context.close()


def test_the_small_allocator_shows_what_a_prompt_shares(browser: Any, served: LocalServer) -> None:
    for page in open_page(browser, served):
        page.get_by_text("Try the allocator").click()
        for computed in (9, 1):
            page.get_by_role("button", name="Add a request").click()
            expect(page.locator("#teach-state")).to_contain_text(f"{computed} computed")
        page.get_by_role("button", name="Free all pages").click()
        expect(page.locator("#teach-pages [data-owner=free]")).to_have_count(24)


def test_the_page_is_small_while_idle_and_fits_a_phone(browser: Any, served: LocalServer) -> None:
    for width, height, longest in ((1360, 900, 900), (390, 844, 1700)):
        for page in open_page(browser, served, viewport={"width": width, "height": height}):
            expect(page.locator("#state")).to_have_text("live")
            expect(page.locator("#pages-empty")).to_contain_text("pages are free")
            expect(page.locator("#pages")).to_be_hidden()
            assert page.evaluate("document.documentElement.scrollHeight") <= longest
            for link in ("Chat", "Cache"):
                page.get_by_role("link", name=link).click()
                assert page.evaluate("document.documentElement.scrollWidth") <= width
            rows: dict[float, list[Any]] = {}
            for tile in page.locator(".tile").all():
                box = tile.bounding_box()
                rows.setdefault(box["y"], []).append(box)
            inner = page.locator(".tiles").bounding_box()
            for boxes in rows.values():  # none has a hole at its end
                right = max(box["x"] + box["width"] for box in boxes)
                assert abs(right - inner["x"] - inner["width"]) < 2


def test_a_large_tree_stays_bounded(browser: Any) -> None:
    with Runtime("demo", num_pages=40_000, max_running_requests=16) as runtime:
        prompts = [[300 + number % 40, 400 + number, 7] for number in range(1500)]
        runtime.generate(prompts, SamplingParams(max_tokens=1), progress=False)
        with LocalServer(runtime) as served:
            for page in open_page(browser, served):
                expect(items(page).first).to_be_visible()
                assert items(page).count() <= 400
                items(page).first.click()  # at most 24 children are there until it is opened
                expect(items(page).nth(40 + 30)).to_be_attached()
                assert items(page).count() <= 400


@pytest.mark.skipif(SCREENSHOTS is None, reason="RADIXSERVE_SCREENSHOTS=FOLDER writes pictures")
def test_screenshots(browser: Any, served: LocalServer, small: Runtime) -> None:
    folder, image = Path(str(SCREENSHOTS)), pytest.importorskip("PIL.Image")
    for scheme in ("light", "dark"):
        options = {"color_scheme": scheme, "viewport": {"width": 1360, "height": 1240},
                   "reduced_motion": "reduce"}  # fmt: skip
        for page in open_page(browser, served, **options):
            small.flush_cache()
            page.get_by_label("in a session").check()
            ask(page, "How do I sort a list?", n=2, tokens=24)
            page.get_by_label("in a session").uncheck()
            page.get_by_role("button", name="Branch from here").first.click()
            ask(page, "What is a lambda?", n=3, tokens=24)
            page.get_by_role("button", name="Start anew").click()
            ask(page, "How do I copy a file?", tokens=24)
            ask(page, "What is a generator?", n=2, tokens=24)
            page.get_by_role("button", name="Run the script").click()
            expect(page.locator(".cache")).to_have_count(3, timeout=4 * TIMEOUT)
            page.get_by_label("Prompt", exact=True).fill("How do I split a string?")
            page.get_by_label("Text to look for").fill("How do I sort a dictionary?")
            page.get_by_role("button", name="Find").click()
            expect(page.locator("#found")).to_be_visible()
            page.locator("#tree li").nth(1).click()
            with busy(small, 12):
                expect(page.locator("#requests tr")).to_have_count(12)
                picture = page.screenshot(full_page=True)
            write_picture(image, folder / f"page-{scheme}.png", picture)
            page.set_viewport_size({"width": 1360, "height": 900})
            small.flush_cache()
            page.reload()
            open_chat(page)
            say(page, "How do I sort a list?", tokens=64)
            say(page, "What is a lambda?", tokens=64)
            page.get_by_role("button", name="Fork here").first.click()
            say(page, "How do I sort a dictionary?", tokens=64)
            page.get_by_text("Settings", exact=True).click()
            expect(page.locator("#tree .path")).not_to_have_count(0)
            write_picture(image, folder / f"page-chat-{scheme}.png", page.screenshot())


def write_picture(image: Any, path: Path, picture: bytes) -> None:
    image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(path, optimize=True)
    assert path.stat().st_size < 250_000
