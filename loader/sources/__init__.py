"""Where models come from: a local path, a Hub id, a URL; and the cache that keeps what is not local."""
