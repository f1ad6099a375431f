"""Documentation entries turned into synthetic chats and plain documents."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

from demo_model.corpus import Entry
from demo_model.format import ASSISTANT, BOS, END, EOS, SYSTEM, USER
from demo_model.questions import (
    ARGUMENTS,
    ASK,
    ASK_LONG,
    ASK_SHORT,
    HANDMADE,
    MORE,
    ROLES,
    RULES,
    SHORTER,
    SIBLINGS,
    THANKS,
    WELCOME,
    WHERE,
)


def first_sentence(entry: Entry) -> str:
    head = re.sub(r"\s+", " ", entry.blocks[0])
    match = re.match(r"(.{15,}?[^. ][.!?])(?=\s[A-Z`\"']|$)", head)
    return match.group(1) if match else head.rstrip(":") + ("" if head.endswith(".") else ".")


def take_blocks(blocks: Sequence[str], limit: int) -> list[str]:
    """The first blocks that fit into a number of characters, at least one."""
    taken: list[str] = []
    for block in blocks:
        if taken and sum(map(len, taken)) + len(block) > limit:
            break
        if "::=" not in block:
            taken.append(block if len(block) < 1500 else block[: block.rfind(" ", 0, 1500)])
    while taken and len(taken) > 1 and taken[-1].endswith(":"):
        taken.pop()
    return taken


def heading(entry: Entry) -> str:
    if entry.kind == "module":
        return f"`{entry.name}` is a module of the Python standard library."
    where = "is a built-in" if entry.module == "builtins" else "is a"
    there = "" if entry.module == "builtins" else f" in the `{entry.module}` module"
    if entry.kind == "method":
        return f"`{entry.name}{entry.signature or '()'}` is a method of `{entry.owner}`."
    signature = entry.signature if entry.kind == "function" else ""
    return f"`{entry.name}{signature}` {where} {entry.kind}{there}."


def answer(entry: Entry, limit: int = 450) -> str:
    body = "\n\n".join(take_blocks(entry.blocks, limit))
    if entry.kind == "topic":
        return body
    return f"{heading(entry)} {body}"


def short_answer(entry: Entry) -> str:
    sentence = first_sentence(entry)
    return sentence if entry.kind == "topic" else f"`{entry.name}`: {sentence}"


NOT_VERBS = frozenset(
    "a an the this if true like same internal helper coroutine replacement identical default see "
    "when for number alias deprecated similar given no not it in on use new".split()
)


def task_question(entry: Entry) -> str | None:
    """'Serialize obj to a string.' becomes 'How do I serialize obj to a string?'"""
    sentence = first_sentence(entry).rstrip(".")
    match = re.match(r"([A-Z][a-z]+) (.{10,90})$", sentence)
    if not match or entry.kind not in {"function", "method"}:
        return None
    verb = "get" if match[1] == "Return" else match[1].lower()
    if verb in NOT_VERBS or verb.endswith(("ing", "s", "ed")):
        return None
    return f"{verb} {match[2]}"


class Chats:
    """Makes conversations from entries, with a random generator of its own."""

    def __init__(self, entries: Sequence[Entry], rng: random.Random) -> None:
        self.rng = rng
        self.entries = [e for e in entries if e.public and e.blocks and take_blocks(e.blocks, 1)]
        self.weights = list(itertools.accumulate(e.weight for e in self.entries))
        self.members: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.kind in {"function", "class"}:
                self.members.setdefault(entry.module, []).append(entry.name)

    def pick(self) -> Entry:
        return self.rng.choices(self.entries, cum_weights=self.weights)[0]

    def spoken_name(self, entry: Entry) -> str:
        """One of the ways in which people write the name of a thing."""
        if entry.kind == "topic":
            return self.rng.choice(entry.names)
        if entry.kind == "module":
            return self.rng.choice(
                (entry.name, f"`{entry.name}`", f"the {entry.name} module", f"module {entry.name}")
            )
        short = entry.name.removeprefix(entry.module + ".")
        forms = [entry.name] * 3 + [f"`{entry.name}`", f"{short} in {entry.module}"]
        if entry.kind != "class":
            forms.append(f"{entry.name}()")
        if len(short) > 5:
            forms.append(short)
        return self.rng.choice(forms)

    def open_turn(self, entry: Entry) -> tuple[str, str]:
        """A question on an entry and its answer."""
        roll = self.rng.random()
        name = self.spoken_name(entry)
        if roll < 0.08:
            return self.rng.choice(ASK_SHORT).format(n=name), short_answer(entry)
        if roll < 0.14:
            return self.rng.choice(ASK_LONG).format(n=name), answer(entry, 1400)
        task = task_question(entry) if roll < 0.34 else None
        if task:
            ask = self.rng.choice(("How do I {t}?", "How can I {t}?", "Which function can {t}?"))
            return ask.format(t=task), f"Use `{entry.name}`. " + answer(entry)
        ask = self.rng.choice(ASK)
        if entry.kind == "topic" and ask.startswith("help"):
            ask = "Explain {n}."
        return ask.format(n=name), answer(entry)

    def follow_up(self, entry: Entry) -> tuple[str, str] | None:
        """A question that only makes sense after the answer on the same entry."""
        rng = self.rng
        kind = rng.choice(("more", "short", "arguments", "where", "siblings"))
        rest = entry.blocks[len(take_blocks(entry.blocks, 450)) :]
        if kind == "more" and take_blocks(rest, 1):
            return rng.choice(MORE), "\n\n".join(take_blocks(rest, 450))
        if kind == "short":
            return rng.choice(SHORTER), short_answer(entry)
        if kind == "arguments" and entry.signature:
            return rng.choice(ARGUMENTS), f"It is called as `{entry.name}{entry.signature}`."
        if kind == "where" and entry.kind in {"function", "class"}:
            if entry.module == "builtins":
                return rng.choice(WHERE), f"`{entry.name}` is built in, so no import is needed."
            return rng.choice(WHERE), f"It is in the `{entry.module}` module."
        names = self.members.get(entry.module, [])
        if kind == "siblings" and len(names) > 2 and entry.module != "builtins":
            some = ", ".join(f"`{name}`" for name in names[:8] if name != entry.name)
            return rng.choice(SIBLINGS).format(m=entry.module), f"`{entry.module}` has {some}."
        return None

    def turns(self, count: int, subjects: Sequence[Entry]) -> list[tuple[str, str]]:
        rng = self.rng
        queue = list(subjects)
        made: list[tuple[str, str]] = []
        entry: Entry | None = None
        while len(made) < count:
            follow = self.follow_up(entry) if entry and rng.random() < 0.45 else None
            if follow:
                made.append(follow)
            elif rng.random() < 0.16:
                questions, reply = rng.choice(HANDMADE)
                made.append((rng.choice(questions), reply))
                entry = None
            else:
                entry = queue.pop() if queue else self.pick()
                made.append(self.open_turn(entry))
        if count > 1 and rng.random() < 0.15:
            made[-1] = (rng.choice(THANKS), WELCOME)
        return made

    def system_prompt(self, size: int) -> tuple[str, list[Entry]]:
        """A system prompt of about ``size`` characters and the entries that it quotes."""
        rng = self.rng
        count = rng.randint(0, 4) if size < 600 else rng.randint(3, len(RULES))
        text = " ".join([rng.choice(ROLES), *rng.sample(RULES, count)])
        quoted: list[Entry] = []
        while len(text) + 150 < size:
            entry = self.pick()
            text += f"\n\nNotes on {self.spoken_name(entry)}:\n{answer(entry, 700)}"
            quoted.append(entry)
        return text[: size + 1200], quoted

    def render(self, longest: int) -> str:
        """One chat of up to roughly ``longest`` characters, in the format of the template."""
        rng = self.rng
        pieces = [BOS]
        subjects: list[Entry] = []
        roll = rng.random()
        if roll < 0.72:
            ceiling = longest if roll < (0.15 if longest < 3000 else 0.35) else 250
            system, quoted = self.system_prompt(rng.randint(60, max(250, ceiling * 2 // 3)))
            subjects = rng.sample(quoted, min(2, len(quoted)))
            pieces.append(f"{SYSTEM}{system}{END}")
        most = 5 if longest < 6000 else 12
        count = 1 if rng.random() < 0.4 else rng.randint(2, most)
        for question, reply in self.turns(count, subjects):
            pieces.append(f"{USER}{question}{END}{ASSISTANT}{reply}{END}")
        return "".join(pieces)


class Documents:
    """Plain documents: runs of entries of one module, as ``help()`` would list them."""

    def __init__(self, entries: Sequence[Entry], rng: random.Random) -> None:
        self.rng = rng
        by_module: dict[str, list[Entry]] = {}
        for entry in entries:
            key = entry.name if entry.kind == "topic" else entry.module
            by_module.setdefault(key, []).append(entry)
        self.modules = list(by_module.values())
        self.weights = list(
            itertools.accumulate(sum(len(e.text) for e in m) ** 0.8 for m in self.modules)
        )

    @staticmethod
    def show(entry: Entry) -> str:
        title = entry.names[0] if entry.names else entry.name + entry.signature
        return f"{title}\n\n{entry.text}"

    def render(self, longest: int) -> str:
        members = self.rng.choices(self.modules, cum_weights=self.weights)[0]
        start = self.rng.randrange(len(members))
        text = ""
        for entry in members[start:]:
            text += ("\n\n" if text else "") + self.show(entry)
            if len(text) > longest:
                break
        if len(text) > longest:
            offset = self.rng.randrange(len(text) - longest + 1) if self.rng.random() < 0.6 else 0
            cut = text.rfind("\n", 0, offset) + 1
            text = text[cut : cut + longest]
        return f"{BOS}{text}{EOS}"
