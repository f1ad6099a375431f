"""Converts a request's messages, text or ids to a prompt's token ids."""
