"""Images of ranks from the memory of one node into that of another, over TCP.

`TransferPool` owns the threads and sockets.  A push sends an image while its snapshot still fills
the slot, and is acknowledged when every chunk stands verified at the other end and the root of the
image is what its owner says; a fetch brings chunks of a sealed image back.  What is sent, whither,
and when it counts is decided elsewhere: objects go in (`ImageSource`, `Destination`), events come
out (`events`).  No byte is received that was not announced, none is written outside the memory
that the owner hands in, and after `Transfer.abort` returns the memory is the owner's again.
"""
