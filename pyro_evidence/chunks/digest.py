"""What tells rows from other rows, however they are cut."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyro_evidence import tensor_file
from pyro_evidence.chunks.join import JOIN
from pyro_evidence.chunks.reading import arguments, require_repeatable


def digest_of_chunks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hash of all bytes of the columns, one chunk after the other, and of those of other processes; one pass.

    :param args: of ``run_chunks``: the chunks.
    """
    chunks = args[0] if args else kwargs["chunks"]
    require_repeatable(chunks)
    columns: dict[int, Any] = {}
    for number, chunk in enumerate(chunks):
        for place, value in enumerate(arguments(number, chunk)):
            column = columns.setdefault(place, hashlib.sha256())
            if isinstance(value, Tensor):
                column.update(tensor_file.bytes_of(value.detach()))
    said = JOIN.get().said(" ".join(c.hexdigest() for c in columns.values()))
    return hashlib.sha256(" ".join(said).encode()).hexdigest()
