"use strict";
// The chat view. A chat is a tree of messages, kept by this browser; each answer says how much of its
// prompt was cached. Uses what page.js defines.

const MAX_CHATS = 200; // of a tenant; the oldest go first

// A chat: {id, title, at, system, nextId, leaf, messages}. `messages` maps ids to {id, parent, role, content,
// reasoning, facts, end, ids, pictures}: `parent` is null for a first message, `end` tells why an answer ended; `facts` are
// the token counts of an answer, `ids` its token ids with those of its prompt, which are not stored. `leaf` is the last message shown; the chat that is shown is its path to the root.
const chats = { tenant: null, all: new Map(), open: null, stopper: null, running: null, shown: "" };

// -- keeping them -----------------------------------------------------------------------------------

const chatKey = (id) => `${chatPrefix()}${id}`;
const chatPrefix = () => `radixserve-chat:${encodeURIComponent(chats.tenant)}:`;

function readChats() {
  chats.all.clear();
  for (let at = 0; at < localStorage.length; at += 1) {
    const name = localStorage.key(at);
    if (!name.startsWith(chatPrefix())) continue;
    try {
      const chat = JSON.parse(localStorage.getItem(name));
      if (chat.id && chat.messages) chats.all.set(chat.id, chat);
    } catch { /* written by something else */ }
  }
}

const byTime = () => [...chats.all.values()].sort((a, b) => b.at - a.at);

function keepChat(chat) {
  // Drops the oldest chats where the browser's space is used up.
  chats.all.set(chat.id, chat);
  for (const old of byTime().slice(MAX_CHATS)) dropChat(old);
  for (;;) {
    try {
      localStorage.setItem(chatKey(chat.id), JSON.stringify(chat, (name, value) => (name === "ids" || name === "pictures" ? undefined : value)));
      return;
    } catch {
      const oldest = byTime().at(-1);
      if (oldest === chat) {
        $("say-state").textContent = "This chat is too long for the browser's storage: it ends with this page.";
        return;
      }
      dropChat(oldest);
    }
  }
}

function dropChat(chat) {
  chats.all.delete(chat.id);
  localStorage.removeItem(chatKey(chat.id));
}

addEventListener("storage", (event) => { // another tab has written
  if (chats.tenant === null || chats.running || (event.key && !event.key.startsWith(chatPrefix()))) return;
  const id = chats.open?.id;
  readChats();
  chats.open = chats.all.get(id) || null;
  showChats(true);
});

// -- the tree of a chat -------------------------------------------------------------------------------

const childrenOf = (chat, id) => Object.values(chat.messages).filter((message) => message.parent === id);

function pathOf(chat, leaf = chat.leaf) {
  const path = [];
  for (let id = leaf; id !== null; id = chat.messages[id].parent) path.unshift(chat.messages[id]);
  return path;
}

function newestLeaf(chat, id) {
  // The end of the way through `id` that was written last.
  for (;;) {
    const next = childrenOf(chat, id).at(-1);
    if (!next) return id;
    id = next.id;
  }
}

const leavesOf = (chat) => Object.values(chat.messages).filter((message) => !childrenOf(chat, message.id).length);

function addMessage(chat, role, content) {
  const message = { id: chat.nextId, parent: chat.leaf, role, content };
  chat.nextId += 1;
  chat.messages[message.id] = message;
  chat.leaf = message.id;
  return message;
}

// -- drawing --------------------------------------------------------------------------------------------

function showChats(isChanged) {
  if (!view.snapshot) return;
  if (chats.tenant !== view.snapshot.tenant) {
    chats.tenant = view.snapshot.tenant;
    readChats();
    chats.open = null;
    isChanged = true;
  }
  const sign = `${view.hasTemplate} ${view.snapshot.model}`;
  if (!isChanged && chats.shown === sign) return; // as for most snapshots
  chats.shown = sign;
  $("chats").replaceChildren(...byTime().map(rowOfChat));
  $("chats-clear").hidden = !chats.all.size;
  showTurns();
}

function rowOfChat(chat) {
  const row = element("li");
  const name = element("button", "name", chat.title);
  name.setAttribute("aria-current", String(chat === chats.open));
  name.addEventListener("click", () => openChat(chat));
  const drop = element("button", "quiet drop", "×");
  drop.setAttribute("aria-label", `Delete the chat ${chat.title}`);
  drop.disabled = chats.running?.chat === chat;
  drop.addEventListener("click", () => {
    dropChat(chat);
    if (chats.open === chat) openChat(null);
    else showChats(true);
  });
  row.append(name, drop);
  const leaves = leavesOf(chat);
  if (chat !== chats.open || leaves.length < 2) return row;
  const forks = element("ul", "forks");
  const shown = new Set(pathOf(chat).map((message) => message.id));
  for (const leaf of leaves) {
    const fork = element("button", "name", nameOfFork(chat, leaf));
    fork.setAttribute("aria-current", String(shown.has(leaf.id)));
    fork.addEventListener("click", () => goTo(leaf.id));
    const item = element("li");
    item.append(fork);
    forks.append(item);
  }
  row.append(forks);
  return row;
}

function nameOfFork(chat, leaf) {
  // The message with which it leaves the other forks.
  const path = pathOf(chat, leaf.id);
  const at = path.findLastIndex((message) => childrenOf(chat, message.parent).length > 1);
  if (path[at].role === "user") return path[at].content.slice(0, 80);
  const turn = childrenOf(chat, path[at].parent).indexOf(path[at]) + 1;
  return `answer ${turn}: ${path[at].content.slice(0, 80)}`;
}

function openChat(chat) {
  chats.open = chat;
  view.path = null;
  $("say-state").textContent = "";
  showChats(true);
  markPath();
  $("say-text").focus();
}

function goTo(leaf) {
  if (chats.running) return;
  chats.open.leaf = leaf;
  keepChat(chats.open);
  showChats(true);
  markPath();
}

function showTurns() {
  const chat = chats.open;
  const path = chat ? pathOf(chat) : [];
  $("turns").replaceChildren(...path.map((message) => turnOf(chat, message)));
  $("chat-title").textContent = chat ? chat.title : "New chat";
  $("turns-empty").hidden = path.length > 0;
  $("turns-empty").textContent = view.hasTemplate === false
    ? "This model has no chat template: the view Cache sends it plain prompts."
    : "Each answer tells how much of its prompt came from the cache. Fork a chat anywhere: the forks share what stands before.";
  $("say-picture").hidden = !view.snapshot.takes_pictures;
  for (const id of ["say-text", "say-send"]) $(id).disabled = view.hasTemplate === false;
  showWays(chat);
  showTotals(chat);
  $("turns-box").scrollTop = $("turns-box").scrollHeight;
}

function showWays(chat) {
  // The messages that follow the last one shown, where the chat is to be forked.
  const next = chat && !chats.running ? childrenOf(chat, chat.leaf) : [];
  $("ways").hidden = !next.length;
  const buttons = next.map((message) => {
    const button = element("button", "", message.content.slice(0, 60) || "(empty)");
    button.addEventListener("click", () => goTo(newestLeaf(chat, message.id)));
    return button;
  });
  $("ways").replaceChildren(element("span", "note", "Your message forks the chat here. Already there:"), ...buttons);
}

function showTotals(chat) {
  const answers = chat ? Object.values(chat.messages).filter((message) => message.facts) : [];
  const sum = (name) => answers.reduce((total, { facts }) => total + facts[name], 0);
  const prompts = sum("cached_tokens") + sum("computed_tokens");
  const forks = chat ? leavesOf(chat).length : 0;
  $("chat-note").textContent = !answers.length ? "" : `${count(answers.length, "answer")}` +
    `${forks > 1 ? ` in ${forks} forks` : ""}: ${number.format(sum("cached_tokens"))} of ${number.format(prompts)} ` +
    `prompt tokens cached (${((100 * sum("cached_tokens")) / Math.max(1, prompts)).toFixed(0)} %)`;
}

const ENDS = { length: "longest answer reached", stopped: "stopped: this much is kept", error: "broken off" };

function turnOf(chat, message) {
  const item = element("li", message.role);
  item.dataset.id = message.id;
  const head = element("div", "who");
  head.append(element("b", "", message.role === "user" ? "You" : view.snapshot.model));
  const siblings = childrenOf(chat, message.parent);
  if (siblings.length > 1) head.append(switcher(chat, message, siblings));
  const said = element("div", "said");
  fillText(said, message.content);
  said.prepend(...shownPictures(message));
  item.append(head);
  if (message.reasoning) {
    const thoughts = element("details", "thoughts");
    thoughts.append(element("summary", "", "Reasoning"), element("div", "", message.reasoning));
    item.append(thoughts);
  }
  item.append(said, element("div", "line"));
  fillFacts(item, message);
  if (!chats.running) item.lastChild.append(element("span", "grow"), ...actionsOf(chat, message));
  return item;
}

function switcher(chat, message, siblings) {
  const at = siblings.indexOf(message);
  const box = element("span", "switch");
  const step = (by, text, name) => {
    const button = element("button", "quiet", text);
    button.setAttribute("aria-label", name);
    button.disabled = !siblings[at + by] || Boolean(chats.running);
    button.addEventListener("click", () => goTo(newestLeaf(chat, siblings[at + by].id)));
    return button;
  };
  box.append(step(-1, "‹", "Fork before"), `fork ${at + 1} of ${siblings.length}`, step(1, "›", "Fork after"));
  return box;
}

function fillFacts(item, message) {
  const line = item.lastChild;
  line.replaceChildren();
  const { facts, end } = message;
  if (facts) {
    const prompt = facts.cached_tokens + facts.computed_tokens;
    const text = element("span", "", `prompt ${number.format(prompt)} = `);
    text.append(element("i", "swatch c-cached"), `${number.format(facts.cached_tokens)} cached + `,
      element("i", "swatch c-computed"), `${number.format(facts.computed_tokens)} computed · `,
      element("i", "swatch c-generated"), count(facts.generated_tokens, "token"));
    line.append(tokenBar(facts, prompt + facts.generated_tokens), text);
  }
  if (ENDS[end]) line.append(element("span", end === "error" ? "end bad" : "end", ENDS[end]));
}

function actionsOf(chat, message) {
  const isLast = message.id === chat.leaf;
  const action = (text, does) => {
    const button = element("button", "quiet", text);
    button.addEventListener("click", does);
    return button;
  };
  if (message.role === "user") {
    const edit = action("Edit", () => {
      goTo(message.parent);
      Object.assign($("say-text"), { value: message.content }).focus();
      attached.splice(0, attached.length, ...(message.pictures || []));
      showAttached();
    });
    return isLast ? [action("Answer", () => answer(chat)), edit] : [edit];
  }
  const again = action("Answer again", () => {
    goTo(message.parent);
    answer(chat);
  });
  const fork = action("Fork here", () => {
    goTo(message.id);
    $("say-text").focus();
  });
  if (!isLast) return [again, fork];
  return message.end === "length" || message.end === "stopped" ? [action("Go on", () => answer(chat, message)), again] : [again];
}

function fillText(box, text) {
  // Fenced code, code in backquotes and bold words; all of it is set as text, never as HTML.
  const parts = [];
  text.split(/^ {0,3}```[^\n]*\n?/m).forEach((piece, at) => {
    if (at % 2) parts.push(element("pre", "", piece.replace(/\n$/, "")));
    else if (piece.trim()) parts.push(inlineText(at ? piece.replace(/^\n+/, "") : piece));
  });
  box.replaceChildren(...parts);
}

function inlineText(text) {
  const box = element("span");
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`\n]+`$/.test(part)) box.append(element("code", "", part.slice(1, -1)));
    else if (/^\*\*[^*\n]+\*\*$/.test(part)) box.append(element("b", "", part.slice(2, -2)));
    else box.append(part);
  }
  return box;
}

// -- asking -------------------------------------------------------------------------------------------

$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("say-text").value.trim();
  if (!(content || attached.length) || chats.running || !view.snapshot) return;
  let chat = chats.open;
  if (!chat) {
    const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    const title = content.split("\n")[0].slice(0, 80) || attached[0].name;
    chat = { id, title, at: 0, system: $("say-system").value.trim(), nextId: 1, leaf: null, messages: {} };
    chats.open = chat;
  }
  Object.assign(addMessage(chat, "user", content), takeAttached());
  $("say-text").value = "";
  answer(chat);
});

$("say-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("say").requestSubmit();
});

function bodyOf(chat, continued) {
  const messages = pathOf(chat).map((message) => ({ role: message.role, content: contentOf(message) }));
  if (chat.system) messages.unshift({ role: "system", content: chat.system });
  const body = { messages, stream: true, return_token_ids: true,
    stream_options: { include_usage: true, continuous_usage_stats: true } };
  if ($("say-length").value) body.max_tokens = Number($("say-length").value);
  if ($("say-temperature").value) body.temperature = Number($("say-temperature").value);
  if (continued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

async function answer(chat, continued) {
  // The next answer; with `continued` the rest of one that was cut.
  if (chats.running) return;
  const body = bodyOf(chat, continued);
  const message = continued || addMessage(chat, "assistant", "");
  const before = { ...message };
  chat.at = Date.now();
  chats.stopper = new AbortController();
  chats.running = { chat, message };
  keepChat(chat);
  showChats(true);
  $("say-send").hidden = true;
  $("say-stop").hidden = false;
  $("say-state").textContent = "Waiting for the first token ...";
  let error = null;
  try {
    await receive(await ask("v1/chat/completions", body, chats.stopper.signal), chat, message);
  } catch (caught) {
    error = caught;
    message.end = caught.name === "AbortError" ? "stopped" : "error";
  }
  if (!message.content && !message.reasoning && error) { // nothing of it to be kept
    delete chat.messages[message.id];
    chat.leaf = message.parent;
  } else if (error && continued && message.content === before.content) message.end = before.end;
  chats.running = null;
  $("say-send").hidden = false;
  $("say-stop").hidden = true;
  keepChat(chat);
  showChats(true);
  $("say-state").textContent = stateOf(error, message);
  markPath(message);
}

function stateOf(error, message) {
  if (error) return error.name === "AbortError" ? "Stopped: what was said so far is kept." : error.message;
  const { cached_tokens: cached, computed_tokens: computed } = message.facts;
  return `Complete: ${number.format(cached)} of ${count(cached + computed, "prompt token")} were cached.`;
}

async function receive(stream, chat, message) {
  delete message.end;
  let promptIds = [];
  const ids = [];
  try {
    for await (const chunk of events(stream)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) message.facts = factsOf(chunk.usage);
      promptIds = chunk.prompt_token_ids || promptIds;
      const [choice] = chunk.choices;
      if (!choice) continue;
      ids.push(...(choice.token_ids || []));
      message.content += choice.delta.content || "";
      if (choice.delta.reasoning_content) message.reasoning = (message.reasoning || "") + choice.delta.reasoning_content;
      if (choice.finish_reason) message.end = choice.finish_reason;
      showGrowth(chat, message);
    }
  } finally {
    message.ids = [...promptIds, ...ids];
  }
  if (!message.end) throw new Error("The connection was closed before the end of the answer.");
}

function factsOf(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens || 0;
  return { cached_tokens: cached, computed_tokens: usage.prompt_tokens - cached, generated_tokens: usage.completion_tokens };
}

function showGrowth(chat, message) {
  if (chats.open !== chat) return;
  const item = $("turns").lastChild;
  const box = $("turns-box");
  const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 40;
  item.querySelector(".said").textContent = message.content;
  fillFacts(item, message);
  $("say-state").textContent = message.content || !message.reasoning ? "Answering ..." : "Reasoning ...";
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

$("say-stop").addEventListener("click", () => chats.stopper?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && chats.running && chats.stopper.abort());
addEventListener("pagehide", () => chats.running && keepChat(chats.running.chat));

function markPath() {
  // The tree shows the nodes of the chat's last answer.
  if (document.body.className !== "in-chat" || !view.snapshot) return;
  const ids = chats.open ? pathOf(chats.open).findLast((message) => message.ids)?.ids : null;
  view.path = ids ? { ids, cached: ids.length, namespace: view.snapshot.tenant } : null;
  schedule(0);
}

// -- the views ------------------------------------------------------------------------------------------

$("chat-new").addEventListener("click", () => openChat(null));
$("chats-clear").addEventListener("click", () => {
  if (chats.running || !confirm(`Delete ${count(chats.all.size, "chat")}?`)) return;
  for (const chat of byTime()) dropChat(chat);
  openChat(null);
});

function showView() {
  if (location.hash === "#chat" || location.hash === "#cache") document.body.className = `in-${location.hash.slice(1)}`;
  const isChat = document.body.className === "in-chat";
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === (isChat ? "#chat" : "#cache")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.path = null;
  $("found").hidden = $("find-clear").hidden = true;
  markPath();
  draw();
}

addEventListener("hashchange", showView);
showView();
