"""Prints what one request costs in Python: calls, files, records, and matches against the tree.

    python tools/trace_request.py [--max-tokens N] [--max-draft-tokens N] [--advice] [--calls]
        [--records] [--objects]

Runs `Runtime("demo").generate` to warm up, and once under a profiler in every thread, with a prompt
whose beginning is cached. Only functions of radixserve and radixserve_kernels count.

decode step   calls in the engine's thread from one `Engine.begin_step` to the next, as the median
              of the steps that decode one row; "files" define the called functions, "moves" are
              calls from a function of one file to a function of another
objects       classes of radixserve of which the request makes instances. Records among them carry
              values from one part to another: named tuples, dataclasses, structures of C, and
              AttentionMetadata. The others own state: handles, queues, buffers, nodes of the tree
made once     instances whose number does not depend on the length of the answer
matches       walks of the prefix tree until the request has ended

--calls lists the functions of a decode step in the order of their calls, --records the classes of
records, --objects the other classes.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import radixserve
import radixserve_kernels

# The packages' folders as they are imported: of the repository or of an editable install's links.
SOURCES = tuple(
    str(Path(package.__file__ or "").parent) + "/" for package in (radixserve, radixserve_kernels)
)
PACKAGES = ("radixserve.", "radixserve_kernels.")
STEP = ("engine/engine.py", "Engine.begin_step")  # the function that begins a step
MATCH = "match_prefix"  # the function that walks the tree
PROMPTS = (  # they have the same beginning
    "The json module of Python reads documents",
    "The json module of Python writes the numbers of a list",
    "The json module of Python has a function for each of these",
)
PLAIN_RECORDS = ("AttentionMetadata",)  # records that are plain classes
STRUCTURE = ctypes.Structure
SEVERAL = (list, tuple, dict, set, frozenset)


def file_of(code: CodeType) -> str | None:
    """The file of one of our functions, relative to its package; None for other functions."""
    for source in SOURCES:
        if code.co_filename.startswith(source):
            return code.co_filename[len(source) :]
    return None


def is_step(code: CodeType) -> bool:
    """Whether a function begins a step."""
    name = file_of(code)
    return name is not None and name.endswith(STEP[0]) and code.co_qualname == STEP[1]


def is_ours(value: object) -> bool:
    """Whether `value` is an instance of one of our classes, but not an array of ctypes."""
    return type(value).__module__.startswith(PACKAGES) and not isinstance(value, ctypes.Array)


@dataclass
class Step:
    """The calls from one step to the next."""

    calls: list[tuple[str, str]] = field(default_factory=list)  # (file, function)
    num_moves: int = 0  # calls from one file to another

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}


class Tracer:
    """A profile function. `objects`: all objects of our classes that were local variables."""

    def __init__(self) -> None:
        self.is_on = False
        self.steps: list[Step] = []
        self.objects: dict[int, Any] = {}  # by id; the references keep ids unique
        self.num_matches = 0
        self.num_calls = 0

    def start(self) -> None:
        self.steps, self.objects, self.num_matches, self.num_calls = [], {}, 0, 0
        self.is_on = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        file = file_of(frame.f_code)
        if file is None:
            return
        if event == "return":
            for value in (*frame.f_locals.values(), arg):
                self._note_objects(value)
            return
        self.num_calls += 1
        self.num_matches += frame.f_code.co_name == MATCH
        if is_step(frame.f_code):
            self.steps.append(Step())
        if self.steps and threading.current_thread() is not threading.main_thread():
            step = self.steps[-1]
            step.calls.append((file, frame.f_code.co_qualname))
            caller = frame.f_back and file_of(frame.f_back.f_code)
            step.num_moves += caller is not None and caller != file

    def _note_objects(self, value: object, depth: int = 2) -> None:
        if is_ours(value):
            self.objects.setdefault(id(value), value)
        if depth and isinstance(value, SEVERAL) and len(value) < 64:
            for item in value.values() if isinstance(value, dict) else value:
                self._note_objects(item, depth - 1)


def is_record(kind: type) -> bool:
    """Whether a class is a record, whose instances carry values instead of owning state."""
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_plain = kind.__name__ in PLAIN_RECORDS
    return is_tuple or is_plain or dataclasses.is_dataclass(kind) or issubclass(kind, STRUCTURE)


def parts(value: object) -> Iterator[object]:
    """The values of an object's fields."""
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
    if isinstance(value, tuple):
        yield from value


def new_objects(tracer: Tracer, before: dict[int, Any]) -> list[object]:
    """The objects that the tracer saw and those in their fields, without those of `before`."""
    made: dict[int, object] = {}
    stack = list(tracer.objects.values())
    while stack:
        value = stack.pop()
        if is_ours(value) and id(value) not in before and id(value) not in made:
            made[id(value)] = value
            stack += parts(value)
    return list(made.values())


def reachable_from(roots: list[object]) -> dict[int, Any]:
    """The objects of our classes that can be reached from `roots`, by id."""
    reached: dict[int, Any] = {}
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_ours(value):
            reached[id(value)] = value
            stack += parts(value)
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            stack += value
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="of the answer")
    parser.add_argument("--max-draft-tokens", type=int, default=0, help="of a row (default: 0)")
    parser.add_argument("--advice", action="store_true", help="with the extensions that follow it")
    parser.add_argument("--calls", action="store_true", help="list a decode step's calls")
    parser.add_argument("--records", action="store_true", help="list the classes of records")
    parser.add_argument("--objects", action="store_true", help="list the other classes")
    args = parser.parse_args()

    from radixserve import Runtime, SamplingParams

    tracer = Tracer()
    threading.setprofile(tracer)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    with Runtime(
        "demo", num_pages=4096, max_draft_tokens=args.max_draft_tokens, advice=args.advice
    ) as rt:
        rt.generate(PROMPTS[0], params)
        sys.setprofile(tracer)
        tracer.start()
        rt.generate(PROMPTS[1], params)
        tracer.is_on = False
        before = {**tracer.objects, **reachable_from([rt])}
        for value in list(before.values()):
            before |= reachable_from(list(parts(value)))
        tracer.start()
        rt.generate(PROMPTS[2], params)
        tracer.is_on = False
        sys.setprofile(None)
        steps = tracer.steps[2:-1]  # the first one computes the prompt
        show(tracer, steps, new_objects(tracer, before), args)


def show(
    tracer: Tracer, steps: list[Step], objects: list[object], args: argparse.Namespace
) -> None:
    """Print the counts and the requested lists. `steps`: those that decode one row."""
    kinds = Counter(map(type, objects))
    records = {kind: count for kind, count in kinds.items() if is_record(kind)}
    others = {kind: count for kind, count in kinds.items() if not is_record(kind)}
    num_once = sum(count for count in kinds.values() if count < len(steps))
    print(f"decode step   {median(len(step.calls) for step in steps):g} calls in "
          f"{median(len(step.files) for step in steps):g} files, "
          f"{median(step.num_moves for step in steps):g} moves between files")  # fmt: skip
    print(f"request       {len(kinds)} kinds of objects, {len(records)} of them records; "
          f"{num_once} made once; {tracer.num_calls} calls, {args.max_tokens} tokens")  # fmt: skip
    print(f"prompt        matched {tracer.num_matches} times against the tree")
    if args.calls:
        middle = steps[len(steps) // 2]
        for file, name in middle.calls:
            print(f"    {file:55s} {name}")
    for is_listed, listed in ((args.records, records), (args.objects, others)):
        for kind in sorted(listed, key=lambda kind: (kind.__module__, kind.__name__)):
            if is_listed:
                print(f"    {kinds[kind]:4d} {kind.__module__}.{kind.__qualname__}")


if __name__ == "__main__":
    main()
