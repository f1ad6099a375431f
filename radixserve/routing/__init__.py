"""Which replica a request goes to: an index of what all of them have cached, and one cost."""
