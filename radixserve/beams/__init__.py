"""Beam search in the scheduler: the requests of a search's beams. Plugs in as an extension."""
