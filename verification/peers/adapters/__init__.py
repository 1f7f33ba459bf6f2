"""One adapter a file: other people's packages as `verification.peers.Peer`. None of them is needed by anything else."""
