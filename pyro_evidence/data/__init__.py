"""Rows that are not in memory at once: chunks that are read pass by pass, and shards that other processes hold."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.data.chunks import Parquet, Slices
    from pyro_evidence.data.distributed import shards
    from pyro_evidence.data.groups import Groups

__all__ = ["Groups", "Parquet", "Slices", "shards"]

import_on_demand(__name__)
