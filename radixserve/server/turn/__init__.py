"""One turn of a conversation, whatever the protocol."""
