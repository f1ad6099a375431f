"""`GrammarCompiler`: compiles grammars for one vocabulary and caches them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from radixserve.errors import InvalidRequest, RequestFailed
from radixserve.grammar.backend import TokenTable, check_installed, compile_matcher
from radixserve.grammar.matcher import CompiledGrammar
from radixserve.structured_outputs import StructuredOutput

COMPILE_TIMEOUT_S = 10.0  # a grammar that takes longer is refused
_AT_ONCE = 4  # most grammars compiled at the same time, abandoned ones included
_KEPT = 256  # most compiled grammars in the cache
_STACK = 256 << 20  # bytes of address space, since nested rules are compiled recursively
_stack_lock = threading.Lock()


class GrammarCompiler:
    """Compiles grammars and caches the last 256. May be used from any thread except the engine's:
    compiling takes about a millisecond; the first call also makes a table of all tokens, which
    takes seconds for a large vocabulary."""

    def __init__(self, tokenizer: Callable[[], Any], *, keeps_options: bool = False) -> None:
        """tokenizer: returns the model's `tokenizers.Tokenizer` or raises InvalidRequest; called
        for the first grammar. `keeps_options`: see `compile_matcher`."""
        self._keeps_options = keeps_options
        self._tokenizer = tokenizer
        self._table: TokenTable | None = None
        self._table_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._compiled_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def compile(self, structured_outputs: StructuredOutput) -> CompiledGrammar:
        """Returns the compiled grammar, from the cache if it is there.

        Raises InvalidRequest if it cannot be used or takes longer than COMPILE_TIMEOUT_S to
        compile; RequestFailed if other grammars occupy the compiler for that long.
        """
        with self._compiled_lock:
            compiled = self._compiled.get(structured_outputs)
            if compiled is not None:
                self._compiled.move_to_end(structured_outputs)
                return compiled
        table = self._token_table()
        native = self._in_thread(
            lambda: compile_matcher(structured_outputs, table, keeps_options=self._keeps_options)
        )
        compiled = CompiledGrammar(native, table, jump_forward=structured_outputs.jump_forward)
        with self._compiled_lock:
            self._compiled[structured_outputs] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def has(self, structured_outputs: StructuredOutput) -> bool:
        """Whether a grammar is compiled already."""
        with self._compiled_lock:
            return structured_outputs in self._compiled

    def _token_table(self) -> TokenTable:
        with self._table_lock:
            if self._table is None:
                check_installed()
                self._table = TokenTable(self._tokenizer())
            return self._table

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`, run in a thread with a large stack. Raises InvalidRequest
        after COMPILE_TIMEOUT_S; the abandoned thread runs until the compiler's own limits end
        it."""
        if not self._slots.acquire(timeout=COMPILE_TIMEOUT_S):
            raise RequestFailed(f"{_AT_ONCE} other grammars are being compiled: try again later")
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._slots.release()

        with _stack_lock:  # the size is that of all threads that start meanwhile
            before = threading.stack_size(_STACK)
            try:
                threading.Thread(target=run, name="radixserve-grammar", daemon=True).start()
            except RuntimeError as error:  # the system has no memory for another thread
                self._slots.release()
                raise RequestFailed(f"the grammar cannot be compiled now: {error}") from error
            finally:
                threading.stack_size(before)
        try:
            return answer.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"the grammar takes longer than {COMPILE_TIMEOUT_S:g} s to compile: make it smaller"
            ) from None
