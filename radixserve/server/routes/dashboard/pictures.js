"use strict";
// Pictures of the chat view: those that are pasted, dropped or chosen go with the next message. The page
// keeps them until it is closed; the browser's storage is too small for them.

const MAX_PICTURE = 20 * 2 ** 20; // bytes, as the server takes
const attached = []; // {name, url} of the next message

async function attach(files) {
  for (const file of files) {
    if (file.size > MAX_PICTURE) $("say-state").textContent = `${file.name} has more than 20 MiB, which is the most.`;
    else attached.push({ name: file.name || "a pasted picture", url: await asUrl(file) });
  }
  showAttached();
}

function asUrl(file) {
  return new Promise((done, fail) => {
    const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => fail(reader.error) });
    reader.readAsDataURL(file);
  });
}

const picturesIn = (transfer) => [...(transfer?.files || [])].filter((file) => file.type.startsWith("image/"));

function thumbnail({ name, url }) {
  return Object.assign(element("img", "thumb"), { src: url, alt: name, title: name });
}

function showAttached() {
  $("say-pictures").replaceChildren(...attached.map((picture) => {
    const button = Object.assign(element("button", "quiet"), { type: "button", title: "Remove it" });
    button.setAttribute("aria-label", `Remove ${picture.name}`);
    button.append(thumbnail(picture));
    button.addEventListener("click", () => {
      attached.splice(attached.indexOf(picture), 1);
      showAttached();
    });
    return button;
  }));
}

function takeAttached() {
  const pictures = attached.splice(0);
  showAttached();
  return pictures.length ? { pictures, numPictures: pictures.length } : {};
}

function shownPictures({ pictures, numPictures }) {
  if (pictures) return pictures.map(thumbnail);
  return numPictures ? [element("p", "note", `${count(numPictures, "picture")}, sent before this page was opened`)] : [];
}

function contentOf({ content, pictures }) {
  if (!pictures) return content;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

$("say-picture").addEventListener("click", () => $("say-files").click());
$("say-files").addEventListener("change", ({ target }) => attach([...target.files]).then(() => (target.value = "")));
$("say-text").addEventListener("paste", (event) => {
  const files = picturesIn(event.clipboardData);
  if (!files.length || !view.snapshot?.takes_pictures) return;
  event.preventDefault();
  attach(files);
});
for (const name of ["dragover", "drop"]) {
  $("chat-panel").addEventListener(name, (event) => {
    if (!view.snapshot?.takes_pictures || ![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attach(picturesIn(event.dataTransfer));
  });
}
