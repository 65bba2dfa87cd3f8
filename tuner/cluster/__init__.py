"""Children on the nodes of a Ray cluster, behind the interface of those on this machine."""
