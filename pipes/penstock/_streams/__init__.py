"""Data in shards: files of many records each, by position or read forward, and the formats that they come in."""
