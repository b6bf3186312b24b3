"""Files, local or remote: paths, versions, copies on a local disk, compression, and penstock's own files.

Knows no shards and no formats.
"""
