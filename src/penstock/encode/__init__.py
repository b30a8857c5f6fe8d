"""Turn texts into ids, ids into rows, and rows into batches.

Workers tokenize whole chunks; the producer packs and batches. Columnar: no Python object for each
document.
"""
