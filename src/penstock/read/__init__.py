"""Turn an address into a column of texts: formats, places and what is kept on disk.

Stateless, so that any worker can read any chunk. Remote data is fetched in byte ranges, with
deadlines and retries.
"""
