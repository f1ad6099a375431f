"use strict";
// The page of radixserve: asks for a snapshot while it is looked at, and draws it. No library.

const $ = (id) => document.getElementById(id);
const [MAX_ROWS, SMALL_TREE] = [400, 100]; // rows of the tree, nodes of a small one
const [MAX_REQUESTS, MAX_TABLES] = [60, 24]; // rows of the table, page tables that are drawn
const HISTORY = 120; // samples of a chart
const number = new Intl.NumberFormat("en");
const count = (n, name) => `${number.format(n)} ${name}${n === 1 ? "" : "s"}`;

const view = {
  snapshot: null, // the last one
  history: [], // {at, hit, rate, running, used, evicted}
  open: new Map(), // node -> whether it was opened or closed by hand
  wanted: new Set(), // nodes of which more children are asked for
  selected: null, // key of a node
  path: null, // token ids that were looked for, and up to where they are cached
  known: null, // keys of all nodes that were ever shown
  isPaused: false,
  cell: -1, // the page under the cursor
  context: null, // what the next prompt continues
  hasTemplate: null, // whether the model has a chat template; null until it is known
  timer: 0,
};

// -- asking ---------------------------------------------------------------------------------

const key = () => sessionStorage.getItem("radixserve-key") || "";

async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (key()) headers.authorization = `Bearer ${key()}`;
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  if (body === undefined) Object.assign(options, { method: "GET", body: undefined });
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => ({}));
  const message = found.error?.message || `the server answered ${answer.status}`;
  throw Object.assign(new Error(message), { status: answer.status });
}

const askJson = async (path, body) => (await ask(path, body)).json();

// -- the loop: one snapshot after another, none while the page is hidden ----------------------

function schedule(seconds) {
  clearTimeout(view.timer);
  if (!view.isPaused && !document.hidden) view.timer = setTimeout(poll, seconds * 1000);
}

let polling = false;
async function poll() {
  if (polling) return;
  polling = true;
  let wait = 2;
  try {
    const body = { opened: [...view.wanted].slice(0, 200) };
    if (view.path) body.path = view.path.ids.slice(0, 100000);
    const found = await askJson("v1/cache/snapshot", body);
    wait = found.next_s;
    showMain(true);
    $("forget").hidden = !key();
    note(found, view.snapshot);
    view.snapshot = found;
    draw();
    showPaused();
    if (view.hasTemplate === null) await readModel();
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return; // until there is one
    }
    if (error.status === 429) wait = 5;
    else setState(error.status ? error.message : "the server does not answer", "bad");
  } finally {
    polling = false;
  }
  schedule(wait);
}

async function readModel() {
  showSampling((await askJson("v1/models")).data[0].sampling_defaults);
  const { chat_template: template } = await askJson("tokenizer_info").catch((error) => {
    if (error.status === 400) return {}; // a model without a tokenizer
    throw error;
  });
  view.hasTemplate = Boolean(template);
  for (const id of ["as-chat", "find-chat"]) Object.assign($(id), { checked: view.hasTemplate, disabled: !template });
  showChats();
}

function showSampling(defaults) {
  // What holds for fields that are left empty, and whose it is.
  const bySource = new Map();
  for (const [name, { value, source }] of Object.entries(defaults)) {
    if (name === "temperature" || source !== "neutral") {
      bySource.set(source, [...(bySource.get(source) || []), `${name} ${value}`]);
    }
  }
  const parts = [...bySource].map(([source, values]) => `${values.join(", ")} (${source})`);
  const text = `Left empty: ${parts.join("; ")}.`;
  $("sampling").textContent = text;
  for (const id of ["say-temperature", "temperature"]) Object.assign($(id), { placeholder: defaults.temperature.value, title: text });
}

const showPaused = () => setState(view.isPaused ? "paused" : "live", view.isPaused ? "" : "live");

function setState(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = `state ${kind}`;
}

function askForKey() {
  setState(key() ? "this key is not known" : "an API key is needed", "bad");
  if (!$("locked").hidden) return;
  showMain(false);
  $("key").focus();
}

function showMain(isAllowed) {
  // Until the first snapshot neither is shown: nothing jumps when it is known whether a key is needed.
  $("locked").hidden = isAllowed;
  for (const id of ["main", "footer", "views", "pause"]) $(id).hidden = !isAllowed;
}

// -- drawing what was found -------------------------------------------------------------------

function draw() {
  const found = view.snapshot;
  if (!found) return;
  $("model").textContent = found.tenant ? `${found.model} · ${found.tenant}` : found.model;
  showTiles(found);
  showTree();
  showPages();
  showRequests(found);
  showChats();
  $("cost").textContent = `the last one took the engine ${found.cost_ms.engine.toFixed(1)} ms, ` +
    `the next one comes after ${found.next_s.toFixed(1)} s.`;
}

function note(found, before) {
  const now = found.counters;
  const last = before ? before.counters : now;
  const seconds = before ? Math.max(0.05, found.at - before.at) : 1;
  const gain = (name) => Math.max(0, (now[name] || 0) - (last[name] || 0));
  const computed = "prefilled_tokens" in now ? gain("prefilled_tokens") : gain("computed_tokens");
  const prompted = gain("prompted_tokens");
  view.history.push({
    hit: prompted ? gain("reused_tokens") / prompted : view.history.at(-1)?.hit || 0,
    rate: (computed + gain("generated_tokens")) / seconds,
    running: found.running + found.waiting,
    used: now.pages_tree || 0,
    evicted: gain("evicted_tokens"),
  });
  if (view.history.length > HISTORY) view.history.shift();
  const gone = gain("evicted_tokens"), past = gain("superseded_tokens");
  if (gone || past) $("evicted-note").textContent = `${count(gone || past, "token")} ${gone ? "went" : "superseded"} just now`;
  const rounded = (tokens) => number.format(Math.round(tokens / seconds));
  $("rate-note").textContent = `${rounded(computed)} computed, ${rounded(gain("generated_tokens"))} generated`;
}

function showTiles(found) {
  const c = found.counters;
  const last = view.history.at(-1);
  $("hit-rate").textContent = c.prompted_tokens
    ? `${((100 * c.reused_tokens) / c.prompted_tokens).toFixed(1)} %` : "–";
  $("hit-note").textContent = `${number.format(c.reused_tokens)} of ${number.format(c.prompted_tokens)} prompt tokens`;
  $("rate").textContent = number.format(Math.round(last.rate));
  $("counts").textContent = `${found.running} + ${found.waiting}`;
  $("used").textContent = number.format(c.pages_tree);
  $("used-note").textContent = "pages_total" in c
    ? `of ${number.format(c.pages_total)}, ${number.format(c.pages_free)} free` : "your own";
  const isAll = "evicted_tokens" in c;
  $("evicted-title").parentElement.hidden = !isAll;
  if (isAll) $("evicted").textContent = number.format(c.evicted_tokens);
  for (const canvas of document.querySelectorAll("[data-chart]")) chart(canvas);
}

function brush(canvas) {
  // A context in CSS pixels, cleared; null while the canvas is not laid out.
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function chart(canvas) {
  const drawn = brush(canvas);
  if (!drawn) return;
  const { pen, width, height } = drawn;
  const name = canvas.dataset.chart;
  const values = view.history.map((sample) => sample[name]);
  canvas.classList.toggle("flat", !values.some(Boolean));
  const most = name === "hit" ? 1 : Math.max(1, ...values) * 1.1;
  const x = (at) => width - ((values.length - 1 - at) * width) / Math.max(30, values.length - 1);
  const y = (value) => height - 2 - (value / most) * (height - 4);
  pen.beginPath();
  values.forEach((value, at) => pen.lineTo(x(at), y(value)));
  pen.strokeStyle = colour({ evicted: "locked", hit: "leased" }[name] || "tree");
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(0), height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = pen.strokeStyle;
  pen.fill();
  pen.globalAlpha = 1;
}

// -- the tree -----------------------------------------------------------------------------------

const nodeKey = (node) => `${node.namespace}\n${node.id}`;

function rowsOfTree(path) {
  // What is to be shown, top to bottom. In a large tree only what is in use or on `path` is open.
  const { nodes, namespaces } = view.snapshot;
  const opensItself = ({ key, level, node }) => level <= 6 &&
    (nodes.length <= SMALL_TREE || !node || node.sequences > 0 || path.has(key));
  const below = new Map();
  for (const node of nodes) {
    const parent = node.parent === null ? `${node.namespace}\n` : `${node.namespace}\n${node.parent}`;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(node);
  }
  for (const siblings of below.values()) siblings.sort((a, b) => b.id - a.id);
  const rows = [];
  const add = (row, numChildren) => {
    const children = below.get(row.key) || [];
    row.hidden = Math.max(0, (numChildren || 0) - children.length);
    row.hasChildren = children.length + row.hidden > 0;
    row.isOpen = !row.level || (view.open.get(row.key) ?? (children.length > 0 && opensItself(row)));
    if (row.level) rows.push(row);
    if (!row.isOpen || rows.length > MAX_ROWS) return;
    const level = row.level + 1;
    children.forEach((node, at) =>
      add({ key: nodeKey(node), level, node, at: at + 1, of: children.length }, node.num_children));
    if (row.hidden) rows.push({ key: `${row.key}…`, level, more: row.hidden, parent: row });
  };
  const level = namespaces.length === 1 && !namespaces[0].name ? 0 : 1; // 0: its own row is left out
  namespaces.forEach((space, at) =>
    add({ key: `${space.name}\n`, level, space, at: at + 1, of: namespaces.length }, space.num_children));
  return rows.slice(0, MAX_ROWS);
}

function onPath() {
  // Keys of the nodes along the text that was looked for.
  const keys = new Set();
  if (!view.path) return keys;
  const { ids, cached, namespace } = view.path;
  for (const node of view.snapshot.nodes) { // parents come first
    const agrees = (id, at) => node.start + at >= cached || id === ids[node.start + at];
    const follows = node.parent === null || keys.has(`${namespace}\n${node.parent}`);
    if (node.namespace === namespace && node.start < cached && follows && node.head.every(agrees)) keys.add(nodeKey(node));
  }
  return keys;
}

function showTree() {
  const { snapshot } = view;
  const path = onPath();
  const rows = rowsOfTree(path);
  const list = $("tree");
  const old = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const next = new Map(snapshot.victims.map((victim, at) => [nodeKey(victim), at + 1]));
  rows.forEach((row, at) => {
    let item = old.get(row.key);
    if (!item) {
      item = document.createElement("li");
      item.dataset.key = row.key;
      item.setAttribute("role", "treeitem");
      item.tabIndex = -1;
      if (view.known && !view.known.has(row.key) && row.node) item.classList.add("fresh");
    }
    old.delete(row.key);
    fillRow(item, row, path.has(row.key), next.get(row.key));
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] || null);
  });
  let lost = false;
  for (const item of old.values()) {
    lost ||= item === document.activeElement;
    item.remove();
  }
  view.rows = rows;
  view.known = new Set([...(view.known || []), ...rows.map((row) => row.key)].slice(-5000));
  const items = [...list.children];
  if (items.length && !items.some((item) => item.tabIndex === 0)) items[0].tabIndex = 0;
  if (lost && items.length) items.find((item) => item.tabIndex === 0).focus();
  $("tree-empty").hidden = rows.length > 0;
  list.hidden = !rows.length;
  const num = snapshot.nodes.length;
  const all = Math.max(snapshot.counters.nodes || 0, num);
  $("tree-note").textContent = rows.length
    ? `${number.format(num)} of ${count(all, "node")}, ${count(snapshot.page_size, "token")} a page` : "";
  showNode();
}

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function edgeText(node) {
  // The text of an edge; white space is shown, the middle of a long one left out.
  const made = element("span", "text");
  const piece = (text) => {
    for (const part of text.split(/(\n|<\|[^|<>]*\|>|^ | $)/)) {
      if (part === "\n") made.append(element("span", "sp", "↵"));
      else if (part === " ") made.append(element("span", "sp", "·"));
      else if (part.startsWith("<|")) made.append(element("span", "special", part.slice(2, -2)));
      else if (part) made.append(part);
    }
  };
  piece(node.text ?? node.head.join(" "));
  if (node.num_tokens > node.head.length) made.append(element("span", "gap", " … "));
  piece(node.tail_text || "");
  return made;
}

function heat(node) {
  if (node.idle_s === null || node.sequences) return [4, "in use"];
  const level = node.idle_s < 10 ? 3 : node.idle_s < 60 ? 2 : node.idle_s < 600 ? 1 : 0;
  return [level, `last used ${duration(node.idle_s)} ago`];
}

function duration(seconds) {
  if (seconds < 1) return "under a second";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function fillRow(item, row, isOnPath, turn) {
  const { node, space } = row;
  item.setAttribute("aria-level", row.level);
  item.style.paddingLeft = `${8 + Math.min(row.level - 1, 14) * 16}px`;
  item.classList.toggle("path", isOnPath);
  item.setAttribute("aria-selected", String(view.selected === row.key));
  if (row.hasChildren) item.setAttribute("aria-expanded", String(row.isOpen));
  else item.removeAttribute("aria-expanded");
  if (row.at) {
    item.setAttribute("aria-posinset", row.at);
    item.setAttribute("aria-setsize", row.of);
  }
  const [level, lastUse] = node ? heat(node) : [0, ""];
  const sign = JSON.stringify([row.more, space, node && [node.num_tokens, node.head, node.tail_text,
    node.sequences, node.lock_ref, node.state, node.sessions, node.num_sessions, level], row.hidden,
    row.hasChildren, turn]);
  if (item.sign === sign) return;
  item.sign = sign;
  const parts = [element("span", "caret", row.hasChildren ? "▶" : "")];
  parts[0].setAttribute("aria-hidden", "true");
  if (row.more) {
    const how = row.parent.node ? "open to see some" : "find a text to see its path";
    parts.push(element("span", "fact", `and ${number.format(row.more)} more: ${how}`));
  } else if (space) {
    parts.push(element("b", "", space.name ? `namespace ${space.name}` : "default namespace"),
      element("span", "fact", count(space.num_pages, "page")));
  } else {
    const bar = element("i", `heat h${level}`);
    bar.title = lastUse;
    parts.push(bar, edgeText(node), element("span", "fact", count(node.num_tokens, "token")));
    if (node.sequences) parts.push(element("span", "chip use", `used by ${node.sequences}`));
    if (node.num_sessions || node.sessions.length) {
      const names = node.sessions.length ? node.sessions.join(", ") : count(node.num_sessions, "session");
      parts.push(element("span", "chip lease", names));
    }
    if (["closed", "superseded", "retained", "pinned"].includes(node.state)) parts.push(element("span", "chip", node.state));
    if (turn) parts.push(element("span", "chip next", turn === 1 ? "next to go" : `no. ${turn} to go`));
  }
  item.replaceChildren(...parts);
}

function showNode() {
  const node = selectedNode();
  const facts = !node ? [] : [
    `positions ${number.format(node.start)} to ${number.format(node.start + node.num_tokens - 1)}`,
    count(node.num_pages, "page"),
    count(node.lock_ref, "lock"),
    node.sequences ? `used by ${count(node.sequences, "request")}` : heat(node)[1],
    node.state,
    ...(node.num_sessions ? [`held by ${count(node.num_sessions, "session")} here or below`] : []),
    count(node.num_children, "child").replace("childs", "children"),
  ];
  const text = facts.join(" · ");
  if ($("node").textContent !== text) $("node").textContent = text; // it is read aloud when it changes
}

const selectedNode = () => view.snapshot?.nodes.find((node) => nodeKey(node) === view.selected);
const rowAt = (item) => view.rows.find((row) => row.key === item.dataset.key);

function toggle(row, open) {
  const node = row.more ? row.parent.node : row.node;
  if (row.hasChildren) view.open.set(row.key, open);
  if (node && !open && !row.more) view.wanted.delete(node.id);
  if (!node || !open || !(row.more || row.hidden)) return;
  view.wanted.add(node.id);
  schedule(0);
}

function select(item) {
  for (const one of $("tree").children) one.tabIndex = -1;
  item.tabIndex = 0;
  view.selected = item.dataset.key;
  showTree();
  showPages();
  item.focus();
}

$("tree").addEventListener("animationend", (event) => event.target.classList.remove("fresh"));
$("tree").addEventListener("click", (event) => {
  const item = event.target.closest("li");
  if (!item) return;
  const row = rowAt(item);
  toggle(row, !row.isOpen);
  select(item);
});

$("tree").addEventListener("keydown", (event) => {
  const items = [...$("tree").children];
  const at = items.indexOf(document.activeElement);
  if (at < 0) return;
  const row = rowAt(items[at]), last = items.length - 1;
  const isOpen = row.hasChildren && row.isOpen;
  let to = at;
  if (event.key === "ArrowDown" || (event.key === "ArrowRight" && isOpen)) to = Math.min(last, at + 1);
  else if (event.key === "ArrowUp") to = Math.max(0, at - 1);
  else if (event.key === "Home") to = 0;
  else if (event.key === "End") to = last;
  else if (event.key === "ArrowRight") toggle(row, true);
  else if (event.key === "ArrowLeft" && isOpen) toggle(row, false);
  else if (event.key === "ArrowLeft") while (to > 0 && view.rows[to].level >= row.level) to -= 1;
  else if (event.key === "Enter" || event.key === " ") toggle(row, !row.isOpen);
  else return;
  event.preventDefault();
  select(items[to]);
});

// -- how far is a text cached? ------------------------------------------------------------------

const REASONS = {
  full: () => "All of it that may be reused is cached: the last token is always computed.",
  diverged: (found) => `What is cached goes on with ${found.expected} where this text has ${found.actual}.`,
  picture: () => "What is cached goes on with another picture.",
  evicted: () => "What follows was cached, and has been evicted.",
  epoch: () => "More of it is cached, but was computed with other weights.",
  adapter: () => "More of it is cached, but was computed with another adapter, or without one.",
  namespace: () => "Another namespace holds more of it, which is never shared.",
  no_checkpoint: () => "Keys and values of more are cached, but no state of the recurrent layers from there on.",
  window_evicted: () => "Keys and values of more are cached, but those of layers with windows before that point were dropped.",
  never_seen: () => "Nothing that begins like this goes on any further: it was never seen.",
};

$("find").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("find-text").value;
  if (!text) return;
  const box = $("found");
  try {
    const body = $("find-chat").checked ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const { tokens } = await askJson("tokenize", body);
    const found = await askJson("v1/cache/lookup", { prompt: tokens });
    if (found.reason === "diverged") {
      found.expected = `“${await textOf([found.expected])}”`;
      found.actual = `“${await textOf([tokens[found.position]])}”`;
    }
    await showFound(found, tokens);
    view.path = { ids: tokens, cached: found.cached_tokens, namespace: view.snapshot?.tenant || "" };
    schedule(0);
  } catch (error) {
    view.path = null;
    box.textContent = error.message;
  }
  box.hidden = $("find-clear").hidden = false;
});

async function textOf(tokens) {
  return tokens.length ? (await askJson("detokenize", { tokens })).prompt : "";
}

async function showFound(found, tokens) {
  const cached = found.cached_tokens;
  const sentence = element("div", "", `${number.format(cached)} of ${count(found.prompt_tokens, "token")} ` +
    `cached. ${REASONS[found.reason](found)}`);
  const shown = element("p", "tokens");
  const part = async (name, kind, from, to) => {
    if (from < to) shown.append(element(name, kind, await textOf(tokens.slice(from, to))));
  };
  await part("mark", "", 0, cached);
  const stop = found.reason === "full" ? cached : cached + 1;
  await part("span", "stop", cached, stop);
  await part("span", "", stop, Math.min(tokens.length, stop + 400));
  if (tokens.length > stop + 400) shown.append(" …");
  $("found").replaceChildren(sentence, shown);
}

$("find-clear").addEventListener("click", () => {
  view.path = null;
  $("found").hidden = $("find-clear").hidden = true;
  Object.assign($("find-text"), { value: "" }).focus();
  schedule(0);
});

// -- the pages ----------------------------------------------------------------------------------

const OWNERS = {
  free: "free", tree: "in the tree, evictable", leased: "leased or retained", locked: "in the tree, used",
  private: "private to a request", other: "free, or not yours",
};
let grid = null; // {columns, cell, gap}

function cellsOf(runs, size) {
  const cells = new Set();
  for (const [first, length] of runs) {
    const last = Math.floor((first + length - 1) / size);
    for (let at = Math.floor(first / size); at <= last; at += 1) cells.add(at);
  }
  return cells;
}

function layOut(total, width) {
  // The largest cells with which the picture stays lower than about 260 pixels.
  let cell = 16;
  while (cell > 4 && Math.ceil(total / Math.floor(width / cell)) * cell > 260) cell -= 1;
  return { columns: Math.max(1, Math.floor(width / cell)), cell, gap: cell > 6 ? 2 : 1 };
}

function showPages() {
  const { pages, victims, fragmentation, page_size: pageSize, is_admin: isAdmin, counters } = view.snapshot;
  const canvas = $("pages");
  const size = pages.cell_pages;
  const isIdle = !counters.pages_tree && !counters.pages_private;
  $("pages-box").hidden = $("owners").hidden = isIdle;
  $("pages-empty").hidden = !isIdle;
  $("pages-empty").textContent = isAdmin ? `All ${count(pages.total, "page")} are free.` : "None of the pages is yours yet.";
  const total = pages.owners.length;
  grid = layOut(total, canvas.parentElement.clientWidth - 36);
  canvas.style.height = `${Math.ceil(total / grid.columns) * grid.cell}px`;
  const drawn = brush(canvas);
  const colours = Object.fromEntries(Object.entries(pages.letters).map(([letter, name]) => [letter, colour(name)]));
  const sums = {};
  const selected = cellsOf(selectedNode()?.pages || [], size);
  const next = cellsOf(victims[0]?.pages || [], size);
  const [dot, ink, warn] = ["panel", "ink", "warn"].map(colour);
  const side = grid.cell - grid.gap;
  for (let at = 0; at < total; at += 1) {
    const letter = pages.owners[at];
    sums[letter] = (sums[letter] || 0) + 1;
    if (!drawn) continue;
    const pen = drawn.pen;
    const x = (at % grid.columns) * grid.cell;
    const y = Math.floor(at / grid.columns) * grid.cell;
    pen.fillStyle = colours[letter];
    pen.beginPath();
    pen.roundRect(x, y, side, side, Math.min(3, side / 4));
    pen.fill();
    if (parseInt(pages.users[at], 36) > 1) {
      pen.fillStyle = dot;
      pen.beginPath();
      pen.arc(x + side / 2, y + side / 2, Math.max(1, side / 5), 0, 7);
      pen.fill();
    }
    if (next.has(at) || selected.has(at) || at === view.cell) {
      pen.strokeStyle = selected.has(at) || at === view.cell ? ink : warn;
      pen.lineWidth = 1.5;
      pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
  }
  const each = size > 1 ? `, ${number.format(size)} in each square` : "";
  $("pages-note").textContent = `${count(pages.total, "page")} of ${count(pageSize, "token")}${each}`;
  showOwners(pages, sums, counters);
  showVictims(victims, isAdmin);
  const share = fragmentation.slots ? (100 * fragmentation.unused_slots) / fragmentation.slots : 0;
  const runs = "free_runs" in pages
    ? `Free pages lie in ${count(pages.free_runs, "run")}, the longest of ${number.format(pages.longest_free_run)}.` : "";
  $("fragmentation").textContent =
    `Fragmentation: ${share.toFixed(1)} % of the slots in these pages hold no token. ${runs}`;
}

function showOwners(pages, sums, c) {
  const exact = { free: c.pages_free, private: c.pages_private, locked: c.pages_locked, tree: c.pages_tree - c.pages_locked };
  const always = sums.o ? "tkpo" : "ftkp";
  const items = Object.entries(pages.letters).filter(([letter]) => sums[letter] || always.includes(letter));
  const made = items.map(([letter, name]) => {
    const item = element("li");
    const swatch = element("i", "swatch");
    swatch.style.background = `var(--${name})`;
    const value = pages.cell_pages === 1 ? sums[letter] || 0 : exact[name];
    item.append(swatch, OWNERS[name]);
    if (value !== undefined) item.append(" ", element("b", "", number.format(value)));
    return item;
  });
  const shared = element("li", "", "● shared by several ");
  shared.append(element("b", "", number.format(pages.shared)));
  $("owners").replaceChildren(...made, shared);
  const words = made.map((item) => item.textContent).join(", ");
  $("pages").setAttribute("aria-label", `${number.format(pages.total)} pages: ${words}, ${shared.textContent.slice(2)}`);
}

function showVictims(victims, isAdmin) {
  $("victims").replaceChildren(...victims.map((victim) => {
    const item = element("li");
    item.append(element("i", `heat h${heat(victim)[0]}`), edgeText(victim),
      element("span", "fact", count(victim.num_pages, "page")),
      element("span", "why", `${victim.reason}, idle ${duration(victim.idle_s)}`));
    return item;
  }));
  $("victims-empty").hidden = victims.length > 0;
  $("victims-empty").textContent = isAdmin
    ? "Nothing can be evicted: nothing is cached, or all of it is in use."
    : "The order of eviction is that of all tenants: it is shown to an admin's key only.";
}

function describeCell(at) {
  const { pages } = view.snapshot;
  if (at < 0 || at >= pages.owners.length) return;
  view.cell = at;
  const size = pages.cell_pages;
  const users = parseInt(pages.users[at], 36);
  const name = size > 1 ? `Pages ${at * size} to ${Math.min(pages.total, (at + 1) * size) - 1}, mostly` : `Page ${at}:`;
  const node = view.snapshot.nodes.find((one) => cellsOf(one.pages, size).has(at));
  const text = node && node.text !== null ? ` Holds “${node.text.slice(0, 40)}”.` : "";
  $("page-info").textContent = `${name} ${OWNERS[pages.letters[pages.owners[at]]]}` +
    `${users ? `, used by ${count(users, "request")}` : ""}.${text}`;
  showPages();
}

$("pages").addEventListener("pointermove", (event) => {
  if (!grid || !view.snapshot) return;
  const [column, row] = [event.offsetX, event.offsetY].map((offset) => Math.floor(offset / grid.cell));
  const at = row * grid.columns + column;
  if (column < grid.columns && at !== view.cell) describeCell(at);
});

$("pages").addEventListener("keydown", (event) => {
  if (!grid || !view.snapshot) return;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  describeCell(view.cell < 0 ? 0 : Math.max(0, Math.min(view.snapshot.pages.owners.length - 1, view.cell + step)));
});

// -- requests -----------------------------------------------------------------------------------

const STATES = {
  prefill: "computes its prompt", decode: "generates", queued: "waits for its turn", preempted: "put back: no pages",
};

function showRequests(found) {
  const rows = found.requests.slice(0, MAX_REQUESTS).map((request, at) => rowOfRequest(request, found, at));
  $("requests").replaceChildren(...rows);
  const rest = found.running + found.waiting - rows.length;
  $("requests-note").textContent = rows.length
    ? `${found.running} running, ${found.waiting} waiting${rest > 0 ? `; ${rest} more are not listed` : ""}` : "";
  $("requests-empty").hidden = rows.length > 0;
  document.querySelector("#requests-panel .scroll").hidden = !rows.length;
  found.requests.slice(0, MAX_TABLES).forEach((request, at) => {
    const canvas = rows[at]?.querySelector("canvas");
    if (canvas) drawTable(canvas, request, found.pages);
  });
}

function tokenBar(counts, total) {
  const bar = element("div", "bar");
  for (const kind of ["cached", "computed", "generated"]) {
    const part = element("i", `c-${kind}`);
    part.style.width = `${(100 * (counts[`${kind}_tokens`] || 0)) / Math.max(1, total)}%`;
    bar.append(part);
  }
  return bar;
}

function rowOfRequest(request, found, at) {
  const row = element("tr");
  const name = element("td");
  const id = element("div", "id", request.session || request.id);
  id.title = request.id;
  name.append(id);
  const state = request.state === "follows"
    ? `waits for ${request.waits_for.slice(0, 10)} to compute ${number.format(request.awaited_len)} tokens`
    : STATES[request.state];
  const figures = element("td");
  const total = request.prompt_tokens + request.generated_tokens;
  const numbers = ["cached", "computed", "generated"].map((kind) => number.format(request[`${kind}_tokens`]));
  figures.append(tokenBar(request, total), element("span", "numbers", `${numbers.join(" + ")} of ${number.format(total)}`));
  const table = element("td");
  if (at < MAX_TABLES && request.num_pages) {
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${request.num_shared} pages of the cache, ` +
      `${request.num_pages - request.num_shared} of its own`);
    table.append(canvas);
  }
  row.append(name, element("td", "", state), figures, table);
  return row;
}

function drawTable(canvas, request, pages) {
  // Its pages from left to right; those that several requests use have a dark edge above.
  const drawn = brush(canvas);
  if (!drawn) return;
  const { pen, width, height } = drawn;
  const step = Math.max(1, Math.ceil(request.num_pages / width)); // pages a pixel
  const one = Math.min(8, (width * step) / request.num_pages);
  const side = one - (one > 3 ? 1 : 0);
  const colours = ["locked", "private", "ink"].map(colour);
  const ids = request.pages.flatMap(([first, length]) => Array.from({ length }, (_, at) => first + at));
  for (let at = 0; at < ids.length; at += step) {
    const x = (at / step) * one;
    const isOfTree = at < request.num_shared;
    pen.fillStyle = colours[isOfTree ? 0 : 1];
    pen.fillRect(x, 3, side, height - 3);
    if (isOfTree && parseInt(pages.users[Math.floor(ids[at] / pages.cell_pages)], 36) > 1) {
      pen.fillStyle = colours[2];
      pen.fillRect(x, 0, side, 2);
    }
  }
}

// -- sending, and branching -----------------------------------------------------------------------

let [stopper, sent] = [null, 0]; // of the request on its way; how many there were

$("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stopper) return;
  const text = $("prompt").value || (view.context ? "" : $("prompt").placeholder);
  stopper = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  $("try-state").textContent = "Sent.";
  try {
    await send(text, stopper.signal);
  } catch (error) {
    $("try-state").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  stopper = null;
  $("send").disabled = false;
  $("stop").hidden = true;
});

$("stop").addEventListener("click", () => stopper?.abort());

async function send(text, signal) {
  const n = Number($("n").value);
  const isChat = view.context ? Boolean(view.context.messages) : $("as-chat").checked;
  const body = { max_tokens: Number($("max-tokens").value), n,
    stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("as-session").checked) {
    body.session_id = sessionStorage["radixserve-session"] ||= `page-${Math.random().toString(36).slice(2, 8)}`;
  }
  let path = "v1/completions";
  if (isChat) {
    path = "v1/chat/completions";
    body.messages = [...(view.context?.messages || [])];
    if (text) body.messages.push({ role: "user", content: text });
    else Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  } else {
    const known = view.context?.ids || [];
    const asked = { prompt: text, add_special_tokens: !known.length };
    body.prompt = [...known, ...(text ? (await askJson("tokenize", asked)).tokens : [])];
  }
  const answer = await ask(path, body, signal);
  sent += 1;
  const cards = Array.from({ length: n }, (_, at) => newCard(text || "(goes on)", n > 1 ? `${sent}.${at + 1}` : `${sent}`));
  $("answers-empty").hidden = true;
  $("answers").prepend(...cards.map((card) => card.item));
  let usage;
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage || usage;
    for (const choice of chunk.choices) {
      const card = cards[choice.index];
      card.said.textContent += isChat ? choice.delta.content || "" : choice.text;
      card.ids.push(...(choice.token_ids || []));
    }
  }
  const cached = usage.prompt_tokens_details.cached_tokens;
  const facts = `prompt ${usage.prompt_tokens} = ${cached} cached + ${usage.prompt_tokens - cached} computed`;
  cards.forEach((card) => {
    const context = isChat ? { messages: continued(body.messages, card.said.textContent, !text) }
      : { ids: [...body.prompt, ...card.ids] };
    finishCard(card, `${facts} · ${count(card.ids.length, "token")} generated`, { ...context, name: card.name });
  });
  $("try-state").textContent = `${n > 1 ? `${n} answers are` : "The answer is"} complete: ${facts}.`;
  schedule(0);
}

function continued(messages, said, goesOn) {
  // The messages with the answer, which may be the end of the last one.
  if (!goesOn) return [...messages, { role: "assistant", content: said }];
  const last = messages.at(-1);
  return [...messages.slice(0, -1), { ...last, content: last.content + said }];
}

async function* events(answer) {
  // The events of a stream as objects.
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function newCard(asked, name) {
  const item = element("li");
  const said = element("div", "said");
  item.append(element("div", "asked", `${name}  ${asked}`), said);
  while ($("answers").children.length >= 24) $("answers").lastChild.remove();
  return { item, said, name, ids: [] };
}

function finishCard(card, facts, context) {
  const line = element("div", "line");
  const button = element("button", "", "Branch from here");
  button.type = "button";
  button.addEventListener("click", () => {
    view.context = context;
    $("context").hidden = false;
    $("context-text").textContent = `Goes on from answer ${context.name}.`;
    if ($("n").value === "1") $("n").value = "3";
    const placeholder = "What comes next? Empty: the answer itself is continued.";
    Object.assign($("prompt"), { value: "", placeholder }).focus();
  });
  line.append(element("span", "", facts), element("span", "grow"), button);
  card.item.append(line);
}

$("context-clear").addEventListener("click", () => {
  view.context = null;
  $("context").hidden = true;
  Object.assign($("prompt"), { placeholder: "How do I sort a list?" }).focus();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").requestSubmit();
});

// -- side by side ---------------------------------------------------------------------------------

const CACHES = {
  radix: ["Radix tree", "to the token"], hash: ["Hash of blocks", "whole blocks"], off: ["No cache", "all again"],
};

$("compare").addEventListener("click", async () => {
  const button = $("compare");
  button.disabled = true;
  $("compare-state").textContent = "The script runs three times ...";
  try {
    showComparison(await askJson("v1/cache/compare", {}));
  } catch (error) {
    $("compare-state").textContent = error.message;
  }
  button.disabled = false;
});

function showComparison(found) {
  const lengths = found.caches[0].requests.map((one) => one.cached_tokens + one.computed_tokens);
  const columns = found.caches.map((run) => {
    const [title, grain] = CACHES[run.cache];
    const box = element("div", "cache");
    box.dataset.cache = run.cache;
    box.append(element("h3", "", title), element("p", "", `${grain}: ${number.format(run.computed_tokens)} tokens ` +
      `computed, ${number.format(run.cached_tokens)} cached`));
    for (const one of run.requests) {
      const row = element("div", "row");
      const name = element("span", "", one.title);
      name.title = one.title;
      row.append(name, tokenBar(one, Math.max(...lengths)), element("span", "numbers", `${one.cached_tokens} + ${one.computed_tokens}`));
      box.append(row);
    }
    return box;
  });
  $("compare-result").replaceChildren(...columns);
  $("compare-legend").hidden = false;
  const computed = Object.fromEntries(found.caches.map((run) => [run.cache, run.computed_tokens]));
  $("compare-state").textContent = `Computed prompt tokens: radix ${number.format(computed.radix)}, hash ` +
    `${number.format(computed.hash)}, no cache ${number.format(computed.off)}. The answers are ` +
    `${found.same_answers ? "the same" : "not the same"}. The bars are the prompts' tokens.`;
}

// -- the head of the page ---------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme() {
  const theme = localStorage.getItem("radixserve-theme") || "auto";
  document.documentElement.classList.toggle("dark", theme === "dark" || (theme === "auto" && systemIsDark.matches));
  $("theme").textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
  $("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
  draw();
}

$("theme").addEventListener("click", () => {
  const at = THEMES.indexOf(localStorage.getItem("radixserve-theme") || "auto");
  localStorage.setItem("radixserve-theme", THEMES[(at + 1) % THEMES.length]);
  setTheme();
});
systemIsDark.addEventListener("change", setTheme);

$("pause").addEventListener("click", () => {
  view.isPaused = !view.isPaused;
  $("pause").textContent = view.isPaused ? "Go on" : "Pause";
  showPaused();
  schedule(0);
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("radixserve-key", $("key").value.trim());
  $("key").value = "";
  poll();
});

$("forget").addEventListener("click", () => {
  sessionStorage.removeItem("radixserve-key");
  location.reload();
});

document.addEventListener("visibilitychange", () => schedule(0));
addEventListener("resize", draw);

addEventListener("DOMContentLoaded", () => { // chat.js is read then
  setTheme();
  poll();
});
