"use strict";
// -- the teaching allocator -------------------------------------------------------------------------

const lesson = { script: [], open: [], named: 0 };

async function teach(action) {
  const script = action ? [...lesson.script, action] : lesson.script;
  try {
    const { states } = await askJson("v1/cache/allocator", { script, cache: $("teach-cache").value });
    lesson.script = script;
    showLesson(states.at(-1));
  } catch (error) {
    $("teach-state").textContent = error.message;
  }
}

function showLesson(state) {
  lesson.open = state ? state.requests.map((one) => one.name) : [];
  const chosen = $("teach-name").value;
  $("teach-name").replaceChildren(...lesson.open.map((name) => element("option", "", name)));
  if (lesson.open.includes(chosen)) $("teach-name").value = chosen;
  for (const id of ["teach-step", "teach-finish"]) $(id).disabled = !lesson.open.length;
  const pages = state ? state.pages : Array.from({ length: 24 }, () => ({ owner: "free", requests: [], tokens: [] }));
  $("teach-pages").replaceChildren(...pages.map((page, index) => {
    const item = element("li", "", page.owner === "free" ? "" : page.tokens.join(" "));
    item.dataset.owner = page.owner === "tree" && page.requests.length ? "used" : page.owner;
    item.title = `page ${index}: ${page.owner}${page.requests.length ? `, used by ${page.requests.join(", ")}` : ""}`;
    return item;
  }));
  if (!state) return;
  const [[kind, name]] = Object.entries(state.action);
  $("teach-state").textContent = state.error ? `${kind} ${name}: ${state.error}` :
    `${kind} ${name}: ${state.cached_tokens} tokens cached, ${state.computed_tokens} computed, ${state.evicted_tokens} evicted.`;
}

$("teach").addEventListener("submit", (event) => {
  event.preventDefault();
  lesson.named += 1;
  teach({ add: `r${lesson.named}`, prompt: $("teach-text").value });
});
$("teach-step").addEventListener("click", () => teach({ step: $("teach-name").value, tokens: $("teach-text").value }));
$("teach-finish").addEventListener("click", () => teach({ finish: $("teach-name").value }));
$("teach-cache").addEventListener("change", () => teach());
$("teach-reset").addEventListener("click", () => {
  Object.assign(lesson, { script: [], named: 0 });
  showLesson();
});
showLesson();
