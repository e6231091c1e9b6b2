"""Images of ranks from the memory of one node into that of another, over TCP.

A node that wants chunks of a sealed image fetches them: `TransferPool` owns the threads and sockets
of both ends.  Other modules decide which images to fetch, from where, and when they count.  Objects
go in (`ImageSource`, `Destination`), one event comes out for each end (`events`).  Every byte is
compared with the requested root, and none is written outside the memory that the owner hands in.
After `Transfer.abort` or `ImageSource.revoke` returns, the memory is the owner's again.
"""
