"""Turn texts into ids, ids into rows, and rows into batches.

Workers tokenize whole chunks; the producer packs and batches. Data is columnar, without a Python
object per document.
"""
