"""WHICH WAY TO WRITE IS BEST HERE?  A search over what can be chosen, measured on the job itself.

Cost model over the whole space, measured finalists, a default that must be beaten.  Pure: what is
to be measured is asked for, what was measured is told, and the same answers give the same winner.
"""
