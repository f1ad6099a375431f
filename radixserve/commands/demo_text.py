"""What the demo asks: one long system prompt, and conversations of two turns that share it."""

from __future__ import annotations

SYSTEM_PROMPT = """\
You are a helpful assistant for the Python standard library. Keep your answers short. Name the \
module a function is in. Use the wording of the documentation. Do not invent functions that do \
not exist. Write code in backquotes. If you do not know the answer, say so.

Notes on list.sort:
Sort the list in place, using only comparisons between items with `<`. The argument `key` is a \
function of one argument that is called once for each item; the default value of `None` means that \
the items are compared directly. If `reverse` is true, the items are sorted as if each comparison \
were reversed. The method returns `None` to remind users that it works by side effect; the \
built-in function `sorted()` returns a new list. The sort is stable: items that compare equal \
keep their order.

Notes on functools.cache:
A decorator that wraps a function with a simple unbounded memo. Because it never needs to evict \
old values, it is smaller and faster than `functools.lru_cache()` with a size limit. The arguments \
of the function must be hashable. The cache is thread-safe, but the wrapped function may be called \
more than once if another thread makes the same call before the first one is done.

Notes on shutil.copy:
Copy the file `src` to the file or directory `dst`. Both should be path-like objects or strings. \
If `dst` is a directory, the file is copied into it under the base name of `src`; if it is a file \
that exists, it is replaced. The contents and the permission bits are copied; other metadata, \
such as the times of creation and modification, is not. Use `shutil.copy2()` to keep it.

Notes on itertools.islice:
Make an iterator that returns selected elements from the iterable. It works like slicing a \
sequence, but negative values are not supported for start, stop or step. If start is zero or \
`None`, iteration begins at the first element; elements before it are consumed and dropped. \
Generators can be sliced this way without computing the values that follow the last one.

Notes on str.split:
Return a list of the words in the string, using `sep` as the delimiter. If `maxsplit` is given, \
at most that many splits are done, so that the list has at most one element more. If `sep` is not \
given or is `None`, runs of white space count as a single separator, and the result has no empty \
strings at its start or end. Splitting an empty string with a given separator returns `['']`. \
The method `str.join()` does the opposite.

Notes on json.loads:
Deserialize a `str`, `bytes` or `bytearray` that contains a JSON document to a Python object. \
Objects become dictionaries, arrays become lists, and `null` becomes `None`. The optional function \
`object_hook` is called with each dictionary and its return value is used in place of it. If the \
data is not a valid JSON document, a `json.JSONDecodeError` is raised, which tells the line and \
the column where the document could not be read."""

# (first question, second question)
CONVERSATIONS = (
    ("How do I sort a list?", "What is a lambda?"),
    ("What is a decorator?", "What is a class?"),
    ("How do I copy a file?", "How do I delete a file?"),
    ("What is a generator?", "What is an iterator?"),
    ("How do I split a string?", "How do I join strings?"),
    ("How do I parse JSON?", "What is a dictionary?"),
)

UNRELATED = "warm up " * 200  # run before anything is timed, then forgotten
