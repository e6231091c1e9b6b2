"""Images that are written without a training: as a stream, and from other images."""
