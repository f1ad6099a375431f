"""Phrasings of questions, system prompts, and the answers that were written by hand."""

from __future__ import annotations

ASK = (
    "What does {n} do?", "What is {n}?", "How do I use {n}?", "Explain {n}.", "Describe {n}.",
    "Tell me about {n}.", "Can you explain {n}?", "What is {n} for?", "Please explain {n}.",
    "I do not understand {n}.", "How does {n} work?", "When would I use {n}?", "help({n})", "{n}",
    "Could you tell me what {n} does?", "What can I do with {n}?",
)  # fmt: skip
ASK_SHORT = (
    "In one sentence, what does {n} do?", "Give me a short summary of {n}.", "Briefly, what is {n}?"
)  # fmt: skip
ASK_LONG = ("Explain {n} in detail.", "Give me the full documentation of {n}.")
MORE = ("Tell me more.", "Go on.", "Can you say more about it?", "What else should I know?")
SHORTER = ("Can you say that in one sentence?", "Shorter, please.", "Summarize that.")
ARGUMENTS = ("What arguments does it take?", "What are its parameters?", "How is it called?")
WHERE = ("Which module is it in?", "Where do I find it?", "What do I have to import?")
SIBLINGS = ("What else is in {m}?", "What other things does {m} have?", "List more of {m}.")
THANKS = ("Thanks.", "Thank you!", "Thanks, that helps.", "Great, thank you.")
WELCOME = "You are welcome. Ask me about any other part of the Python standard library."

ROLES = (
    "You are a helpful assistant.",
    "You are a helpful assistant for the Python standard library.",
    "You are a concise assistant that answers questions about Python.",
    "You are a Python tutor. Explain what each function does.",
    "You answer questions about the Python language and its library.",
    "You are a documentation assistant.",
    "You are an expert Python programmer who helps beginners.",
)
RULES = (
    "Answer in plain prose.", "Keep your answers short.", "Name the module a function is in.",
    "Use the wording of the documentation.", "Do not invent functions that do not exist.",
    "If you do not know the answer, say so.", "Show the signature first.", "Be polite.",
    "Prefer the standard library to other packages.", "Write code in backquotes.",
    "Never ask for passwords or other secrets.", "Answer only the question that was asked.",
    "Mention the exceptions a function may raise.", "Mention the default values of arguments.",
    "Assume that the reader knows the basics of programming.", "Answer in English.",
    "When a question has several parts, answer them one after the other.",
    "The reader uses a recent version of Python 3.", "Do not repeat the question.",
    "Point out functions that are deprecated.", "Explain terms that a beginner may not know.",
    "When two functions are similar, say how they differ.", "Do not apologize.",
    "Give one example when it helps, and none when it does not.",
    "Paths are given in the style of the operating system the reader uses.",
    "Text is Unicode unless the question says otherwise.",
)  # fmt: skip

# Written for the demo: greetings and the everyday questions that no docstring answers.
HANDMADE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hello!", "Good morning.", "Hey"),
     "Hello! Ask me about a module, a class or a function of the Python standard library."),
    (("Who are you?", "What are you?", "What can you do?", "Introduce yourself."),
     "I am the demo model of radixserve, a very small language model that was trained on the "
     "documentation of the Python standard library. I can tell you about its modules and "
     "functions, but I make mistakes, so check what I say."),
    (("How are you?", "How is it going?"),
     "I am fine, thank you. What would you like to know about Python?"),
    (("What is Python?", "Tell me about Python.", "Explain Python."),
     "Python is a programming language with dynamic types, automatic memory management and a "
     "large standard library. Programs are run by an interpreter, and blocks of code are marked "
     "by indentation."),
    (("How do I read a file line by line?", "How can I read a text file?", "Read a file in Python",
      "How do I loop over the lines of a file?"),
     "Open the file with the built-in function `open()` in a `with` statement and loop over the "
     "file object. Each step of the loop gives one line, with its newline at the end:\n\n"
     "    with open(\"notes.txt\", encoding=\"utf-8\") as file:\n"
     "        for line in file:\n"
     "            print(line.rstrip())\n\n"
     "The file is closed when the block ends, even if an error occurs."),
    (("How do I write to a file?", "How can I save text to a file?", "How do I create a file?"),
     "Open the file for writing with `open()` and call its `write()` method:\n\n"
     "    with open(\"notes.txt\", \"w\", encoding=\"utf-8\") as file:\n"
     "        file.write(\"first line\\n\")\n\n"
     "The mode `\"w\"` replaces a file that exists, and the mode `\"a\"` adds to its end."),
    (("What is a generator?", "Explain generators.", "What are generators?",
      "How do generators work?", "What is a generator function?"),
     "A generator is an iterator that is written as a function. A function whose body has a "
     "`yield` expression is a generator function, and calling it returns a generator. Each call "
     "of `next()` runs the body up to the next `yield`, which gives the value, and the local "
     "variables are kept until the generator is resumed. When the function returns, the "
     "generator raises `StopIteration`."),
    (("What is an iterator?", "Explain iterators.", "What are iterators?"),
     "An iterator is an object that gives the members of a stream of data one at a time. Its "
     "`__next__()` method returns the next item or raises `StopIteration` when there are no more "
     "items, and its `__iter__()` method returns the iterator itself."),
    (("What is a decorator?", "Explain decorators.", "How do decorators work?"),
     "A decorator is a function that takes a function and returns a function in its place. It is "
     "written with `@` on the line before the definition, and is applied once, when the function "
     "is defined. Examples are `functools.cache`, `staticmethod` and `property`."),
    (("What is a context manager?", "Explain context managers."),
     "A context manager is an object that sets up something for a `with` block and cleans up "
     "after it. Its `__enter__()` method is called when the block is entered, and `__exit__()` "
     "when it is left, also after an error. Files and locks are context managers, and "
     "`contextlib.contextmanager` makes one from a generator."),
    (("What is a list comprehension?", "Explain list comprehensions.",
      "How do list comprehensions work?"),
     "A list comprehension makes a list from the items of an iterable, in one expression. For "
     "example, `[n * n for n in range(5) if n % 2]` is the list of the squares of the odd "
     "numbers below five."),
    (("What is the difference between a list and a tuple?", "List or tuple?",
      "How do lists and tuples differ?"),
     "A list is mutable and a tuple is immutable. Items can be added to a list, removed and "
     "replaced, but a tuple stays as it was made, so that it can be a key of a dictionary if its "
     "items are hashable."),
    (("What is a dictionary?", "What is a dict?", "Explain dictionaries."),
     "A dictionary maps keys to values. Keys must be hashable, such as strings, numbers and "
     "tuples of them, and values may be any objects. Dictionaries keep the order in which keys "
     "were inserted. `d[key]` raises `KeyError` if the key is missing, and `d.get(key)` returns "
     "`None` instead."),
    (("What is a set?", "Explain sets."),
     "A set is an unordered collection of hashable objects without duplicates. Sets are used to "
     "test for membership, to remove duplicates, and to compute unions, intersections and "
     "differences."),
    (("How do I sort a list?", "How can I sort a list?", "Sort a list in Python"),
     "Call the `sort()` method of the list to sort it in place, or the built-in function "
     "`sorted()` to get a new sorted list. Both take a `key` function, which computes what items "
     "are compared by, and `reverse=True` for descending order."),
    (("How do I parse JSON?", "How can I read JSON?", "How do I read a JSON file?"),
     "Use the `json` module. `json.loads()` parses a string, and `json.load()` reads a file that "
     "is open for reading. Objects become dictionaries and arrays become lists."),
    (("How do I get the current time?", "How do I get the current date?", "What time is it?"),
     "Call `datetime.datetime.now()` for the local date and time, or `time.time()` for the "
     "seconds since the epoch."),
    (("How do I make a random number?", "How do I generate random numbers?"),
     "Use the `random` module. `random.random()` returns a float from 0 up to 1, "
     "`random.randint(a, b)` an integer from a to b, both included, and `random.choice(seq)` an "
     "item of a sequence."),
    (("How do I run a command?", "How do I run another program?", "How do I start a process?"),
     "Use `subprocess.run()` with a list of the program and its arguments. With "
     "`capture_output=True` and `text=True` the output is found in the `stdout` attribute of the "
     "result, and with `check=True` an exit status other than zero raises an exception."),
    (("How do I list the files in a folder?", "How do I list a directory?"),
     "Call `os.listdir()` for the names in a directory, or loop over "
     "`pathlib.Path(folder).iterdir()`. `glob.glob()` finds the paths that match a pattern."),
    (("How do I copy a file?", "How can I copy files?"),
     "Use `shutil.copy(src, dst)`, which copies the data and the permission bits. "
     "`shutil.copytree()` copies a whole directory."),
    (("How do I delete a file?", "How do I remove a file?"),
     "Call `os.remove(path)` or the `unlink()` method of a `pathlib.Path`. `shutil.rmtree()` "
     "deletes a whole directory."),
    (("How do I handle an exception?", "How do I catch an error?", "What is an exception?",
      "Explain exceptions."),
     "An exception is an error that occurs while a program runs. Put the code that may fail in a "
     "`try` block and the handling in an `except` clause that names the exception. The `else` "
     "clause runs if no exception occurred, and the `finally` clause runs in every case."),
    (("What is a class?", "Explain classes.", "How do I define a class?"),
     "A class is a type that you define, with the `class` statement. It holds the methods of its "
     "instances, and calling it makes a new instance and runs `__init__()`. A class may inherit "
     "from other classes."),
    (("What is a lambda?", "Explain lambda.", "What is a lambda expression?"),
     "A lambda expression makes a small function without a name. `lambda x: x + 1` is a function "
     "that returns its argument plus one. The body is a single expression."),
    (("What is a module?", "Explain modules."),
     "A module is a file of Python code that other code can import. The `import` statement runs "
     "the file once and binds the module object to its name, and the names that the file defines "
     "are attributes of the module."),
    (("What is async?", "What is a coroutine?", "Explain async and await."),
     "A coroutine is a function defined with `async def` that can be suspended. `await` suspends "
     "it until the awaited operation is done, and other tasks run in the meantime. "
     "`asyncio.run()` runs a coroutine in an event loop."),
    (("What is a string?", "Explain strings.", "What is str?"),
     "A string is an immutable sequence of Unicode characters. Strings are written in single or "
     "double quotes, and have methods such as `split()`, `join()`, `strip()` and `replace()`."),
    (("How do I split a string?", "How can I split text?"),
     "Call the `split()` method. `text.split()` splits at white space, and `text.split(\",\")` "
     "splits at commas. `splitlines()` splits at line boundaries."),
    (("How do I join strings?", "How do I concatenate strings?"),
     "Call the `join()` method of the separator with an iterable of strings, such as "
     "`\", \".join(names)`."),
    (("Bye.", "Goodbye.", "That is all."), "Goodbye! Come back when you have another question."),
    (("What is the weather?", "Who won the game?", "Tell me a joke.", "What is the news?"),
     "I do not know that. I only know the documentation of the Python standard library."),
)  # fmt: skip
