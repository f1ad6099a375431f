"""llama.cpp in this process, by its shared libraries: one sequence, greedy tokens, logits.

Of the structures only what has not moved for years is named here: the first three fields of the
context's parameters, and a batch. The types of K and V are found by their defaults, and llama.cpp's
own messages confirm that it uses them. The others keep llama.cpp's defaults.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from engine.base import Unavailable
from numpy.typing import NDArray

_LOG_ERROR = 4
_F16 = 1  # of ggml's types, the default of K and V
_TYPE_NAMES = {1: "f16", 8: "q8_0"}
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _Parameters(ctypes.Structure):
    """Of a model or a context, with room for all of their fields."""

    _fields_: ClassVar[Any] = [
        ("num_ctx", ctypes.c_uint32),
        ("num_batch", ctypes.c_uint32),
        ("num_ubatch", ctypes.c_uint32),
        ("rest", ctypes.c_byte * 500),
    ]


class _Batch(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("num_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id")),
        ("logits", ctypes.c_void_p),
    ]


class LlamaLibrary:
    """A model of llama.cpp. Raises Unavailable with its message where it cannot load the file.

    libraries: the folder of libllama and the libggml of processors; the best one is chosen.
    kv_type: of K and V, a number of ggml's.
    """

    def __init__(
        self, libraries: Path, file: Path, num_tokens: int, num_threads: int, kv_type: int = _F16
    ) -> None:
        self._ggml = ctypes.CDLL(str(_library(libraries, "libggml")), ctypes.RTLD_GLOBAL)
        self._llama = llama = ctypes.CDLL(str(_library(libraries, "libllama")))
        self._errors: list[str] = []
        self._messages: list[str] = []
        self._log = _Log(self._note)  # kept: the library calls it
        llama.llama_log_set(self._log, None)
        self._ggml.ggml_backend_load_all_from_path(str(libraries).encode())
        for name in ("model_default_params", "context_default_params"):
            self._function(name, _Parameters)
        load = self._function("model_load_from_file", ctypes.c_void_p, ctypes.c_char_p, _Parameters)
        start = self._function("init_from_model", ctypes.c_void_p, ctypes.c_void_p, _Parameters)
        get_vocab = self._function("model_get_vocab", ctypes.c_void_p, ctypes.c_void_p)
        self._function("vocab_n_tokens", ctypes.c_int32, ctypes.c_void_p)
        self._function("get_memory", ctypes.c_void_p, ctypes.c_void_p)
        self._function("memory_clear", None, ctypes.c_void_p, ctypes.c_bool)
        self._function("batch_get_one", _Batch, ctypes.c_void_p, ctypes.c_int32)
        self._function("decode", ctypes.c_int32, ctypes.c_void_p, _Batch)
        self._function("sampler_init_greedy", ctypes.c_void_p)
        self._function(
            "sampler_sample", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
        )
        self._function(
            "get_logits_ith", ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_int32
        )
        self._function("print_system_info", ctypes.c_char_p)
        self._function("set_n_threads", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        for name in ("sampler_free", "free", "model_free"):
            self._function(name, None, ctypes.c_void_p)
        self._model = load(str(file).encode(), llama.llama_model_default_params())
        if not self._model:
            raise Unavailable("".join(self._errors).strip() or f"llama.cpp did not load {file}")
        parameters = llama.llama_context_default_params()
        parameters.num_ctx = num_tokens
        if kv_type != _F16:
            _set_kv_types(parameters, kv_type)
        self._context = start(self._model, parameters)
        if not self._context:
            raise Unavailable("".join(self._errors).strip())
        name = _TYPE_NAMES[kv_type]
        if not any(f"K ({name})" in text and f"V ({name})" in text for text in self._messages):
            raise Unavailable(f"llama.cpp does not say that K and V are {name}")
        llama.llama_set_n_threads(self._context, num_threads, num_threads)
        self._num_tokens = int(llama.llama_vocab_n_tokens(get_vocab(self._model)))
        self._sampler = llama.llama_sampler_init_greedy()

    @property
    def features(self) -> str:
        """What the chosen library uses of the processor."""
        return str(self._llama.llama_print_system_info().decode())

    def generate(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """Greedy tokens after a prompt that is computed from its beginning."""
        self._start(prompt)
        tokens = [self._sample()]
        while len(tokens) < num_new:
            self._decode(tokens[-1:])
            tokens.append(self._sample())
        return tokens

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Of the token after a prompt."""
        self._start(prompt)
        logits = self._llama.llama_get_logits_ith(self._context, -1)
        return np.array(logits[: self._num_tokens], np.float32)

    def last_logits(self, prompt: Sequence[int], count: int) -> NDArray[np.float32]:
        """[count, V] after each of the last `count` tokens of a prompt."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        wanted = (ctypes.c_int8 * len(prompt))()
        wanted[len(prompt) - count :] = [1] * count
        self._decode(prompt, ctypes.addressof(wanted))
        logits = self._llama.llama_get_logits_ith(self._context, len(prompt) - count)
        return np.ctypeslib.as_array(logits, (count, self._num_tokens)).copy()

    def close(self) -> None:
        self._llama.llama_sampler_free(self._sampler)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def _start(self, prompt: Sequence[int]) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._decode(prompt)

    def _decode(self, tokens: Sequence[int], wanted: int | None = None) -> None:
        """wanted: the address of a flag for each token that asks for logits; None: the last."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self._llama.llama_batch_get_one(ids, len(tokens))
        batch.logits = wanted
        if status := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {status}: {''.join(self._errors)}")

    def _sample(self) -> int:
        return int(self._llama.llama_sampler_sample(self._sampler, self._context, -1))

    def _note(self, level: int, text: bytes, _data: object) -> None:
        self._messages.append(text.decode(errors="replace"))
        if level == _LOG_ERROR:
            self._errors.append(text.decode(errors="replace"))

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._llama, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
        return function


def _set_kv_types(parameters: _Parameters, kv_type: int) -> None:
    """The types follow a callback and its data, which are null. Raises Unavailable."""
    words = (ctypes.c_uint32 * (ctypes.sizeof(parameters) // 4)).from_buffer(parameters)
    default = [0, 0, 0, 0, _F16, _F16]
    places = [i for i in range(len(words) - 5) if words[i : i + 6] == default]
    if len(places) != 1:
        raise Unavailable("the types of K and V are not where they were in llama.cpp's parameters")
    words[places[0] + 4 : places[0] + 6] = [kv_type, kv_type]


def _library(folder: Path, name: str) -> Path:
    """The file of a library, whose name may have a version."""
    for pattern in (f"{name}.so", f"{name}.v*.so", f"{name}.dylib"):
        if files := sorted(folder.glob(pattern)):
            return files[0]
    raise Unavailable(f"{folder} has no {name}.so")
