"""Rows that are not in memory at once: chunks that are read pass by pass, and shards that other processes hold."""

from pyro_evidence.chunks.labels import Groups as Groups
from pyro_evidence.chunks.sources import Parquet as Parquet
from pyro_evidence.chunks.sources import Slices as Slices
