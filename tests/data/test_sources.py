"""Where chunks come from: slices of arrays, mapped files, Parquet."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_evidence import BadInput
from pyro_evidence.data import Parquet, Slices


def test_slices_of_a_mapped_file_are_its_rows(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(25, 3))
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    parts = list(Slices(mapped, torch.arange(25), size=10))
    assert [len(x) for x, _ in parts] == [10, 10, 5]
    np.testing.assert_array_equal(torch.cat([x for x, _ in parts]).numpy(), X)
    assert torch.equal(torch.cat([t for _, t in parts]), torch.arange(25))


def test_slices_of_no_rows_have_their_columns() -> None:
    ((X,),) = Slices(torch.zeros(0, 3))
    assert X.shape == (0, 3)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(BadInput, match=r"arrays of \[3, 2\] rows"):
        Slices(torch.zeros(3), torch.zeros(2))


def test_a_parquet_file_is_read_in_chunks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1.0, 2.0, None, 4.0], "b": [1.0, 2.0, 3.0, 5.0], "n": [7, 8, 9, 10], "s": ["x", "y", "z", "w"]}
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    parts = list(Parquet(path, [("b", "n"), "a"], size=3))
    X, t = (torch.cat(x) for x in zip(*parts, strict=True))
    assert [len(x) for x, _ in parts] == [3, 1]
    assert X.tolist() == [[1.0, 7.0], [2.0, 8.0], [3.0, 9.0], [5.0, 10.0]] and t.isnan().tolist() == [0, 0, 1, 0]
    assert next(iter(Parquet([path, path], ["n"], dtype=None)))[0].dtype == torch.int64
    assert sum(len(x) for (x,) in Parquet([path, path], ["n"])) == 8
    with pytest.raises(BadInput, match="no column c; expected names among a, b, n, s"):
        Parquet(path, ["c"])
    with pytest.raises(BadInput, match="column s holds object; expected numbers"):
        list(Parquet(path, ["s"]))
