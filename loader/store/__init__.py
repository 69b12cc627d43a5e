"""The restart store: weights as a rank holds them, in files that a restarted worker maps instead of reading."""
