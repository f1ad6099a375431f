"""Programs over the API: tree search, decisions, the demo's conversations.

They use names of `radixserve.api` and records, as a program of yours would, and no private
attribute; a test checks both. Nothing below imports them: `Runtime.decide` loads its recipe when it
is called.

search.py     best_of, and a beam over thoughts: `radixserve.search`
decisions.py  DecisionBatch: the likeliest of given answers, for `Runtime.decide`
demo.py       run_demo: the conversations of `radixserve demo`
"""
