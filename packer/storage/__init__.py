"""Writing to a disk that may fail: system calls, durable files, the lock, and the journal."""
