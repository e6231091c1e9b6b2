"""One rank's shard as bytes: container, layout, dtypes and codecs."""
