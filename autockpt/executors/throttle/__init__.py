"""When background bytes may move: rate limits and idle windows of an iteration."""
