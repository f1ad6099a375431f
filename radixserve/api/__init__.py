"""What callers hold: `Runtime`, branches, chats, beam search and search over thoughts."""
