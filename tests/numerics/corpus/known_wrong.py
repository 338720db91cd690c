"""Cases that are answered wrongly today, and what is said. Whoever mends one deletes its line."""

KNOWN_WRONG: dict[str, str] = {}
