"""Where bytes lie: local folder, URL, memory, a store of a user; each commits in one act."""
