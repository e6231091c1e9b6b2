"""WHICH WAY TO WRITE IS BEST HERE?  A search over what can be chosen, measured on the job itself.

Cost model over the whole space, measured finalists, a default that must be beaten.  Pure: the
search asks for measurements and receives results, and the same results give the same winner.
"""
