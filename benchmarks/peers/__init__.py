"""Other people's ways to checkpoint, and ours, behind one interface (`contract.Peer`)."""
