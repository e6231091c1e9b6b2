"""Images of ranks from the memory of one node into that of another, over TCP.

Whoever wants chunks of a sealed image fetches them: `TransferPool` owns the threads and sockets of
both ends.  What is fetched, from where, and when it counts is decided elsewhere: objects go in
(`ImageSource`, `Destination`), one event comes out for each end (`events`).  Every byte is compared
with the root that was asked for, none is written outside the memory that the owner hands in, and
after `Transfer.abort` or `ImageSource.revoke` returns the memory is the owner's again.
"""
