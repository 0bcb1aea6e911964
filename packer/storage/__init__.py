"""Writing to a disk that may fail: system calls, durable and new files, the lock, and the journal."""
