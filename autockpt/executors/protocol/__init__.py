"""Commit, slot overwrite, restore selection, fencing and plan change, as pure state machines."""
