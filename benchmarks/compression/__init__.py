"""What `make bench-codecs` is made of: real tensors, peers in their own environment, rows."""
